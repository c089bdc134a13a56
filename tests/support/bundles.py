"""TensorRT bundles for tests, and their graphs as the reference evaluator runs them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tests.support.caches import uniform_layout
from trtc.builder.module import TRTC_DOMAIN, Module
from trtc.builder.recipes import Array
from trtc.builder.targets.tensorrt.target import PLUGIN_ATTRIBUTES, make_profiles
from trtc.protos.bundle import RECIPE_FILE, Recipe, read_recipe
from trtc.protos.kv import CacheLayout
from trtc.protos.manifest import GRAPH_FILE, Limits, read_manifest
from trtc.protos.record import record_json


class NoReader:
    """For modules whose weights are all constants."""

    def read(self, name: str) -> Array:
        raise AssertionError(f"{name} is not in the bundle")


def bundle_module(bundle: Path) -> Module:
    """The very file, its weights out of weights.safetensors."""
    model = onnx.load(bundle / GRAPH_FILE, load_external_data=True)
    return evaluable(model, read_recipe(bundle).pool, read_manifest(bundle).limits)


def evaluable(
    model: onnx.ModelProto, kv: CacheLayout | None = None, limits: Limits | None = None
) -> Module:
    """A graph with its weights inside as the evaluator takes it: without TensorRT's attributes."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        if node.domain == TRTC_DOMAIN:
            kept = [one for one in node.attribute if one.name not in PLUGIN_ATTRIBUTES]
            assert len(kept) == len(node.attribute) - len(PLUGIN_ATTRIBUTES)
            del node.attribute[:]
            node.attribute.extend(kept)
    return Module(copy, {}, kv, limits)  # type: ignore[arg-type]


def write_kernel_bundle(directory: Path) -> Path:
    """Kernels and recipe of one layer with an FP8 pool; no graph."""
    from trtc.builder.targets.tensorrt.kernels import write_kernels

    directory.mkdir()
    pool = ("num_pages", 2, 16, 2, 64)
    info, fp8 = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT8E4M3FN
    bf16 = onnx.TensorProto.BFLOAT16
    sizes = {"num_kv_heads": 2, "head_dim": 64}
    write = onnx.helper.make_node(
        "kv_write", ["k", "k", "pool", "slots"], ["written"], domain=TRTC_DOMAIN, **sizes
    )
    attend = onnx.helper.make_node(
        "paged_attention",
        ["q", "written", "query_start", "context_lens", "page_table"],
        ["out"],
        domain=TRTC_DOMAIN,
        num_heads=4,
        scale=0.125,
        out_dtype="bf16",
        **sizes,
    )
    steps = ["query_start", "context_lens", "page_table"]
    split = onnx.helper.make_node(
        "attention_split",
        ["q", "written", *steps],
        ["rows", "partial", "stats"],
        domain=TRTC_DOMAIN,
        num_heads=4,
        scale=0.125,
        splits=8,
        out_dtype="bf16",
        **sizes,
    )
    combine = onnx.helper.make_node(
        "attention_combine",
        ["rows", "partial", "stats", *steps[:2]],
        ["combined"],
        domain=TRTC_DOMAIN,
        num_heads=4,
        head_dim=64,
        splits=8,
    )
    graph = onnx.helper.make_graph(
        [write, attend, split, combine],
        "layer",
        [info("k", bf16, ("T", 128)), info("q", bf16, ("T", 256)), info("pool", fp8, pool)],
        [info("out", bf16, ("T", 256)), info("written", fp8, pool)],
        value_info=[info("rows", bf16, ("T", 256))],
    )
    kv = uniform_layout(num_layers=1, page_size=16, num_kv_heads=2, head_dim=64, dtype="f8e4m3")
    limits = Limits(max_batch_size=4, max_seq_len=64, max_num_tokens=32)
    kernels = write_kernels(Module(onnx.helper.make_model(graph), {}, kv, limits), 90, directory)
    recipe = Recipe(
        sm=90,
        pool=kv,
        profiles=make_profiles(limits, kv),
        kernels=kernels,
    )
    (directory / RECIPE_FILE).write_bytes(record_json(recipe))
    return directory


def distance(found: Any, expected: Any) -> float:
    """Root mean square of the difference, as a share of that of `expected`."""
    assert np.isfinite(expected).all()
    difference = np.asarray(found, np.float64) - np.asarray(expected, np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))

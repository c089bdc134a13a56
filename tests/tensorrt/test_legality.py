"""The graphs are legal TensorRT: the real builder of TensorRT for RTX makes plans of them.

It has no plugins, so the graphs are cut at them, as the tensorrt-rtx target does; every segment is
parsed and built without a GPU. It is not TensorRT: kernel choice, speed and plans of that library
are not shown here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.support.models import tiny_checkpoint
from trtc.builder.checkpoint.checkpoint import open_checkpoint
from trtc.builder.checkpoint.dummy import dummy_checkpoint
from trtc.builder.families.registry import checkpoint_spec
from trtc.builder.graph import GraphRequest, build_graph
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.order import TENSORRT_PASSES
from trtc.builder.targets.tensorrt.cut import cut
from trtc.builder.targets.tensorrt.plan import BuiltPlan, PlanOptions, build_plan
from trtc.builder.targets.tensorrt.target import make_profiles, write_graph
from trtc.protos.errors import UnsupportedError
from trtc.protos.manifest import GRAPH_FILE, Limits
from trtc.quant.scheme import SCHEMES

trt: Any = pytest.importorskip(
    "tensorrt_rtx", reason="make test-tensorrt installs it", exc_type=ImportError
)

LIMITS = Limits(max_batch_size=4, max_seq_len=64, max_num_tokens=32)
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma4",
    "phi3",
    "mixtral",
    "qwen3_moe",
)
VARIANTS = (
    "llama3",
    "llama_biased",
    "phi3_longrope",
    "smollm3",
    "olmo3",
    "glm4",
    "cohere2",
    "nemotron",
    "ministral3",
    "glm4_moe",
    "qwen2_moe",
    "gemma4_moe",
    "llama4",
    "hunyuan_dense",
    "phimoe",
)
WITH_EXPERTS = ("mixtral", "qwen3_moe")
SCHEMES_BUILT = ("fp32", "fp8", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4")
OF_EVERY_SCHEME = ("llama", "mixtral")
"""Dense, and with routed experts: what tells nodes of one scheme from those of another."""
WIDTHS = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 1}
MORE_WIDTHS: dict[str, dict[str, Any]] = {
    "mistral": {"head_dim": 32},
    "gemma4": {"layer_types": ["full_attention"]},
    "gemma4_moe": {"layer_types": ["full_attention"], "moe_intermediate_size": 128},
    "qwen3_moe": {"moe_intermediate_size": 128, "mlp_only_layers": []},
    "glm4_moe": {"moe_intermediate_size": 128, "first_k_dense_replace": 0},
    "qwen2_moe": {
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
        "decoder_sparse_step": 1,
    },
}


_ONE_LAYER = (
    *("mistral", "qwen3", "phi3", "mixtral", "llama3", "llama_biased", "phi3_longrope", "glm4"),
    *("nemotron", "ministral3", "hunyuan_dense", "phimoe"),
)
LAYERS_OF_EACH_KIND: dict[str, dict[str, Any]] = {
    "gemma2": {"num_hidden_layers": 2},
    "gemma3": {"num_hidden_layers": 2, "sliding_window_pattern": 2},
    "gemma4": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "olmo3": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "smollm3": {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    **{family: {"num_hidden_layers": 1} for family in _ONE_LAYER},
}
"""Once, of families whose tiny models repeat them: each layer is a segment to build."""


def schemes_of_families() -> list[tuple[str, str]]:
    """Every scheme of both kinds of families; of the others three each, every other one in turn:
    their norms, biases and layouts of heads are the same nodes beside those of any scheme."""
    every = [(family, scheme) for family in OF_EVERY_SCHEME for scheme in SCHEMES_BUILT]
    others = [family for family in FAMILIES if family not in OF_EVERY_SCHEME]
    return every + [
        (family, scheme)
        for number, family in enumerate(others)
        for scheme in SCHEMES_BUILT[number % 2 :: 2]
    ]


def write_segments(
    directory: Path, family: str, scheme: str, kv_dtype: str, **sizes: Any
) -> tuple[list[Path], tuple[Any, ...]]:
    """A bundle's graph cut at its plugins, a file each, and the bundle's profiles."""
    checkpoint = open_checkpoint(str(tiny_checkpoint(family, directory, **sizes)))
    spec = checkpoint_spec(checkpoint, LIMITS.max_seq_len)
    reader, quantization = dummy_checkpoint(spec, SCHEMES[scheme])
    request = GraphRequest(SCHEMES[scheme], kv_dtype, LIMITS, quantization)
    module, _ = run_passes(build_graph(spec, request, reader), TENSORRT_PASSES)
    write_graph(module, reader, directory, lambda message: None)
    model = onnx.load(directory / GRAPH_FILE, load_external_data=False)
    paths = []
    for number, subgraph in enumerate(cut(model)):
        paths.append(directory / f"segment-{number}.onnx")
        paths[-1].write_bytes(subgraph.model.SerializeToString())
    assert len(paths) == len(spec.layers) + 1
    return paths, make_profiles(LIMITS, module.kv)


def build_for(
    path: Path,
    profiles: tuple[Any, ...],
    *sms: int,
    progress: Callable[[str], None] = lambda message: None,
) -> BuiltPlan:
    def configure(config: Any) -> None:
        config.num_compute_capabilities = len(sms)
        for index, sm in enumerate(sms):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), index)

    options = PlanOptions(
        profiles, optimization_level=3, workspace_bytes=1 << 28, configure=configure
    )
    return build_plan(trt, path, options, progress)


def widths(family: str) -> dict[str, Any]:
    """Sizes that groups of 128 divide."""
    return {**WIDTHS, **MORE_WIDTHS.get(family, {})}


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_every_family_builds(family: str, tmp_path: Path) -> None:
    layers = LAYERS_OF_EACH_KIND.get(family, {})
    paths, profiles = write_segments(tmp_path, family, "bf16", "bf16", **layers)
    for path in paths:
        assert len(build_for(path, profiles, 80, 86, 89, 120).plan) > 100_000


def test_every_family_has_schemes_and_every_scheme_several_families() -> None:
    families, schemes = zip(*schemes_of_families(), strict=True)
    assert set(families) == set(FAMILIES)
    assert all(schemes.count(scheme) >= 6 for scheme in SCHEMES_BUILT)


@pytest.mark.parametrize(("family", "scheme"), schemes_of_families())
def test_every_scheme_of_every_family_builds(family: str, scheme: str, tmp_path: Path) -> None:
    """One plan for all SMs that have the scheme: it takes as long as a plan for one, and is refused
    if one of them refuses (`test_fp4_is_refused...` and `test_fp8_is_refused...`)."""
    if family in WITH_EXPERTS and scheme == "nvfp4":
        with pytest.raises(UnsupportedError, match="routed experts cannot have FP4 weights"):
            write_segments(tmp_path, family, scheme, "bf16", **widths(family))
        return
    kv = "f32" if scheme == "fp32" else "f8e4m3"
    paths, profiles = write_segments(tmp_path, family, scheme, kv, **widths(family))
    sms = (120,) if scheme == "nvfp4" else (89, 120)
    for path in paths:
        assert len(build_for(path, profiles, *sms).plan) > 100_000


@pytest.mark.parametrize("sms", [(89,), (89, 120), (120, 89)])
def test_fp4_is_refused_where_the_hardware_has_none(sms: tuple[int, ...], tmp_path: Path) -> None:
    """And for others beside it."""
    paths, profiles = write_segments(tmp_path, "llama", "nvfp4", "f8e4m3", **WIDTHS)
    for path in paths:
        with pytest.raises(UnsupportedError, match="fp4_e2m1"):
            build_for(path, profiles, *sms)


def test_phases_are_told(tmp_path: Path) -> None:
    paths, profiles = write_segments(tmp_path, "llama", "bf16", "bf16")
    told: list[str] = []
    build_for(paths[0], profiles, 89, progress=told.append)
    assert told[0] == "parsing the graph"
    assert len(told) > 3


def first(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == name)


def mix_types(model: onnx.ModelProto) -> None:
    """A residual in f32 into a bf16 graph."""
    add = first(model, "layers.0.attention.residual")
    cast = onnx.helper.make_node("Cast", [add.input[0]], ["wide"], to=onnx.TensorProto.FLOAT)
    add.input[0] = "wide"
    nodes = [cast, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def drop_scale(model: onnx.ModelProto) -> None:
    del first(model, "layers.0.mlp.down.weight_dq").input[1:]


def wrong_blocks(model: onnx.ModelProto) -> None:
    """Scales of another matrix: 2 groups in 768 rows where 256 rows have 6."""
    scale = first(model, "layers.0.mlp.gate.weight_dq").input[1]
    first(model, "layers.0.mlp.down.weight_dq").input[1] = scale


def negative_scale(model: onnx.ModelProto) -> None:
    name = first(model, "layers.0.mlp.down.input_q").input[1]
    for tensor in model.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(onnx.numpy_helper.from_array(-np.ones((), np.float32), name))


def drop_scale_of_experts(model: onnx.ModelProto) -> None:
    del first(model, "layers.0.mlp.experts.down.weight_dq").input[1:]


@pytest.mark.parametrize(
    ("family", "scheme", "damage", "node"),
    [
        ("llama", "bf16", mix_types, "layers.0.attention.residual"),
        ("llama", "int4_awq", drop_scale, "layers.0.mlp.down.weight_dq"),
        ("llama", "int4_awq", wrong_blocks, "layers.0.mlp.down.weight_dq"),
        ("llama", "fp8", negative_scale, "layers.0.mlp.down.input_q"),
        (
            "qwen3_moe",
            "int4_awq",
            drop_scale_of_experts,
            "layers.0.mlp.experts.down.weight_dq",
        ),
    ],
)
def test_a_broken_graph_is_refused_by_the_name_of_our_node(
    family: str,
    scheme: str,
    damage: Callable[[onnx.ModelProto], None],
    node: str,
    tmp_path: Path,
) -> None:
    paths, profiles = write_segments(tmp_path, family, scheme, "bf16", **widths(family))
    build_for(paths[1], profiles, 89)
    model = onnx.load(paths[1], load_external_data=False)
    damage(model)
    paths[1].write_bytes(model.SerializeToString())
    with pytest.raises(UnsupportedError, match=node):
        build_for(paths[1], profiles, 89)


@pytest.mark.parametrize("sms", [(80,), (80, 89), (120, 80)])
def test_fp8_is_refused_where_the_hardware_has_none(sms: tuple[int, ...], tmp_path: Path) -> None:
    paths, profiles = write_segments(tmp_path, "llama", "fp8", "bf16", **WIDTHS)
    with pytest.raises(UnsupportedError, match="could not build"):
        build_for(paths[1], profiles, *sms)


def test_no_file_is_left_outside(tmp_path: Path) -> None:
    """Weights come from weights.safetensors itself: nothing is copied beside it."""
    paths, _ = write_segments(tmp_path, "llama", "bf16", "bf16")
    names = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert names == {*(path.name for path in paths), "graph.onnx", "weights.safetensors"}

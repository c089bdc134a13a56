"""`trtc build --target tensorrt:sm_90`: what is in a bundle, and that its graph is the model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from tests.quant.test_calibrate import calibration_ids
from tests.support.bundles import NoReader, bundle_module, distance
from tests.support.caches import uniform_layout
from tests.support.compiled import stand_in_for_each
from tests.support.models import random_prompt, tiny_checkpoint, transformers_logits
from tests.support.steps import Stepper
from tests.support.triton_kernels import needs_triton
from trtc.builder.evaluator import Evaluator
from trtc.builder.pipeline import build
from trtc.builder.request import BuildRequest
from trtc.builder.targets.cpu import parse_cpu_target
from trtc.builder.targets.tensorrt import kernels
from trtc.builder.targets.tensorrt.target import make_profiles, parse_tensorrt_target
from trtc.protos.bundle import read_recipe
from trtc.protos.errors import UnsupportedError
from trtc.protos.manifest import Limits, read_manifest
from trtc.quant.scheme import SCHEMES
from trtc.runtime.engine.session import open_session

needs_triton()

PROMPT = random_prompt(40)
WIDTHS = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
# Distances allowed: from the unquantised model in f32 (random weights are the worst case of 4
# bits), and from the CPU engine, whose sums round elsewhere and flip some 8-bit activations.
CASES = {
    ("llama", "bf16"): (0.03, 0.02),
    ("llama", "fp8"): (0.2, 0.1),
    ("llama", "int8_sq"): (0.1, 0.07),
    ("llama", "int4_awq"): (0.6, 0.04),
    ("llama", "w4a8_awq"): (0.6, 0.15),
    # Rounded, a router's near tie may fall to another expert, which changes a whole row: in f32
    # there is nothing to forgive.
    ("qwen3_moe", "fp32"): (1e-4, 1e-4),
    ("mixtral", "fp32"): (1e-4, 1e-4),
}


def make_bundle(directory: Path, family: str = "llama", **options: Any) -> Path:
    sizes = options.pop("sizes", WIDTHS)
    checkpoint = tiny_checkpoint(family, directory, **sizes)
    request = BuildRequest(
        model=str(checkpoint),
        output=directory / "bundle",
        max_batch_size=4,
        max_seq_len=64,
        **{"target": "tensorrt:sm_90", "max_num_tokens": 32, **options},
    )
    return build(request).path


def bundle_logits(bundle: Path, ids: list[int]) -> NDArray[np.float32]:
    module = bundle_module(bundle)
    return Stepper(Evaluator(module, NoReader()).run, module.kv, scramble=1).prefill(ids, 17)


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_the_graph_file_is_the_model(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exact file, plugins and all, against Transformers in f32 and against the CPU engine."""
    monkeypatch.setattr(kernels, "compile_kernels", stand_in_for_each)
    options: dict[str, Any] = {"dtype": dtype, "eval_tokens": 0}
    if SCHEMES[dtype].calibration is not None:
        options["calib"] = calibration_ids(tmp_path / "calibration.jsonl")
    bundle = make_bundle(tmp_path, family, **options)
    found = bundle_logits(bundle, PROMPT)
    model, twin_share = CASES[family, dtype]
    assert distance(found, transformers_logits(tmp_path / family, PROMPT)) < model
    cpu = build(
        BuildRequest(
            model=str(tmp_path / family),
            output=tmp_path / "cpu",
            exact_activations=True,
            max_batch_size=4,
            max_seq_len=64,
            max_num_tokens=32,
            **options,
        ),
        target=replace(parse_cpu_target(""), optimization="-O0"),
    ).path
    session = open_session(cpu, num_threads=1, num_pages=8)
    try:
        twin = engine_logits(session, PROMPT)
    finally:
        session.close()
    assert distance(found, twin) < twin_share


def engine_logits(session: Any, ids: list[int]) -> NDArray[np.float32]:
    from tests.support.steps import Pages
    from trtc.runtime.executors.base import StepBatch

    pages = Pages(session.manifest.kv.page_size, 8)
    parts = [
        session.executor.logits(StepBatch(**pages.step({"a": ids[begin : begin + 17]})))
        for begin in range(0, len(ids), 17)
    ]
    return np.concatenate(parts)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two kinds of attention layers: windows in every other one."""
    directory = tmp_path_factory.mktemp("gemma2")
    sizes = {"num_hidden_layers": 2}
    return make_bundle(directory, "gemma2", dtype="bf16", kv_dtype="fp8", sizes=sizes)


def test_every_plugin_node_has_its_kernel_and_attributes(bundle: Path) -> None:
    recipe = read_recipe(bundle)
    facts = [
        (kernel.op, kernel.attributes.get("window"), kernel.tactic) for kernel in recipe.kernels
    ]
    assert facts == [
        ("kv_write", None, 1),
        ("paged_attention", 20, 1),
        ("paged_attention", 20, 2),
        ("paged_attention", 0, 1),
        ("paged_attention", 0, 2),
    ]
    model = onnx.load(bundle / "graph.onnx", load_external_data=False)
    for node in (node for node in model.graph.node if node.domain == "trtc"):
        values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert (values["plugin_namespace"], values["plugin_version"]) == (b"trtc", b"1")
        assert values["aot"] == 1
    manifest = read_manifest(bundle)
    assert manifest.target.archs == ("sm_90",)
    for kernel in recipe.kernels:
        assert kernel.ptx in manifest.files
        assert kernel.entry.encode() in (bundle / kernel.ptx).read_bytes()
        assert (bundle / kernel.cubin).read_bytes().startswith(b"\x7fELF")


def test_all_inputs_but_the_pools_are_int32_and_axes_have_profiles(bundle: Path) -> None:
    model = onnx.load(bundle / "graph.onnx", load_external_data=False)
    extents = read_recipe(bundle).profiles[1].extents
    for info in model.graph.input:
        tensor = info.type.tensor_type
        pool = info.name.startswith("kv_")
        wanted = onnx.TensorProto.FLOAT8E4M3FN if pool else onnx.TensorProto.INT32
        assert tensor.elem_type == wanted
        assert {dim.dim_param for dim in tensor.shape.dim if dim.dim_param} <= set(extents)


def test_the_same_build_gives_the_same_bytes(bundle: Path, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2}
    again = make_bundle(tmp_path, "gemma2", dtype="bf16", kv_dtype="fp8", sizes=sizes)
    assert read_manifest(again).digest == read_manifest(bundle).digest


def test_pools_of_a_profile_stay_below_the_32_bit_limit() -> None:
    kv = uniform_layout(num_layers=1, page_size=16, num_kv_heads=8, head_dim=128, dtype="bf16")
    limits = Limits(max_batch_size=512, max_seq_len=131072, max_num_tokens=8192)
    decode, prefill = make_profiles(limits, kv)
    assert decode.extents["T"] == (1, 512, 512)
    assert prefill.extents["T"] == (1, 8192, 8192)
    assert decode.extents["num_pages"][2] * 2 * 16 * 8 * 128 < 2**31
    assert decode.extents["P"][2] == 8192


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("mixtral", {"max_num_tokens": 1 << 24}, "largest tensor. Use at most 2796202"),
        ("llama", {"target": "tensorrt:sm_80", "kv_dtype": "fp8"}, "sm_80 has no E4M3"),
        ("llama", {"target": "tensorrt:sm_80", "dtype": "fp8"}, "sm_80 has no E4M3"),
        ("llama", {"target": "tensorrt:sm_90", "dtype": "nvfp4"}, "sm_90 has no FP4 arithmetic"),
        ("llama", {"target": "tensorrt:sm_90", "dtype": "iq4"}, "TensorRT has no iq4 weights"),
        ("llama", {"target": "tensorrt:sm_90", "dtype": "int6_g128"}, "has no 6-bit weights"),
        ("llama", {"target": "tensorrt:sm_75"}, "not an SM that trtc compiles kernels for"),
        ("llama", {"target": "tensorrt"}, "says no SM"),
        ("llama", {"dummy_weights": True}, "a plan is built from its weights"),
    ],
)
def test_what_cannot_be_is_refused(
    family: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        make_bundle(tmp_path, family, sizes={}, **{"dtype": "bf16", **options})
    assert not (tmp_path / "bundle").exists()


def test_a_target_is_named_by_its_sm() -> None:
    assert parse_tensorrt_target("sm_120").name == "tensorrt:sm_120"

"""builder/passes/order.py: whole lists, on every scheme and family feature."""

from collections import Counter

import numpy as np
import pytest

from tests.builder.passes.tiny import (
    KV,
    LIMITS,
    Tiny,
    assert_same_function,
    attributes,
    given,
    logits,
    nodes,
    ops,
    scheme_of,
    tiny,
)
from tests.support.engines import config_dict
from trtc.builder.checkpoint.dummy import dummy_checkpoint
from trtc.builder.families.registry import decoder_spec
from trtc.builder.graph import GraphRequest, build_graph
from trtc.builder.module import Module
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.order import NATIVE_PASSES, cpu_passes, cuda_passes
from trtc.builder.plan import make_plan
from trtc.plugins.registry import REGISTRY
from trtc.quant.scheme import SCHEMES
from trtc.quant.site_format import BF16, TableFormats

FEATURES = [
    Tiny(),
    Tiny(bias=True),
    Tiny(head_norm=True, tied=True),
    Tiny(gemma=True),
    Tiny(fused=True),
    Tiny(experts=4),
    Tiny(experts=4, shared="plain"),
    Tiny(experts=4, shared="gated"),
]
QUANTIZED = [
    Tiny("fp8", per_tensor=True),
    Tiny("fp8", equal_input_scales=False, kv_dtype="f8e4m3"),
    Tiny("fp8", gemma=True),
    Tiny("fp8", experts=4),
    Tiny("fp8", experts=4, shared="gated"),
    Tiny("int8_sq", pre_scales=True),
    Tiny("int8_sq", pre_scales=True, equal_pre_scales=True, fused=True),
    Tiny("w4a8_awq", pre_scales=True, bias=True),
]
NARROW = [
    Tiny("bf16", head_norm=True),
    Tiny("int4_awq", pre_scales=True),
    Tiny("int4_awq", zero_points=True, fused=True),
    Tiny("int4_awq", experts=4),
    Tiny("int4_gptq", scattered="q k v gate up down", bias=True),
    Tiny("int4_gptq", scattered="down", bias=True, gemma=True),
    Tiny("nvfp4_weights", bias=True),
    Tiny("nvfp4_weights", experts=4),
    Tiny("mxfp4_weights", fused=True),
]


def tables_of(is_exact: bool) -> TableFormats:
    """An lm_head in bf16, or as the target has it."""
    return TableFormats(BF16) if is_exact else TableFormats()


def lowered(kind: Tiny, *, exact: bool = True) -> tuple[Module, Module]:
    module, reader = tiny(kind)
    passes = cpu_passes(scheme_of(kind), reader, exact_activations=exact, tables=tables_of(exact))
    result, changed = run_passes(module, passes)
    assert changed
    make_plan(result, REGISTRY)
    return module, result


@pytest.mark.parametrize("kind", FEATURES, ids=str)
def test_f32_models_compute_the_same(kind: Tiny) -> None:
    module, result = lowered(kind)
    assert_same_function(module, result, tiny(kind)[1], tolerance=5e-6)


@pytest.mark.parametrize("kind", QUANTIZED, ids=str)
def test_quantised_models_compute_the_same_over_f32(kind: Tiny) -> None:
    kind = Tiny(**{**vars(kind), "dtype": "f32"})
    module, result = lowered(kind)
    # A value on the edge between two E4M3 numbers may fall to the other side.
    assert_same_function(module, result, tiny(kind)[1], tolerance=2e-3)


@pytest.mark.parametrize("kind", [*QUANTIZED, *NARROW], ids=str)
def test_bf16_models_are_as_near_to_f32_as_the_source_graph(kind: Tiny) -> None:
    module, result = lowered(kind)
    exact_module, reader = tiny(Tiny(**{**vars(kind), "dtype": "f32"}))
    exact = logits(exact_module, reader)
    errors = [
        float(np.sqrt(np.mean((logits(one, tiny(kind)[1]) - exact) ** 2)))
        for one in (module, result)
    ]
    assert errors[1] <= 1.5 * errors[0]


@pytest.mark.parametrize("kind", [*FEATURES, *QUANTIZED, *NARROW], ids=str)
def test_a_layer_is_as_few_kernels_as_it_can_be(kind: Tiny) -> None:
    _, result = lowered(kind)
    counts: Counter[str] = ops(result)
    assert set(counts) <= {f"trtc.{name}" for name in REGISTRY} | {"Split"}
    assert counts["trtc.rope_kv_write"] == counts["trtc.paged_attention"] == 2
    assert counts["trtc.embedding"] == 1
    # The last attention's result and the residual stream beside it.
    assert counts["trtc.gather_rows"] == 2
    assert counts["trtc.add"] == (1 if kind.gemma else 0)
    if kind.equal_input_scales and (kind.equal_pre_scales or not kind.pre_scales):
        # The rows that the last o reads are chosen before they are quantised.
        is_quantized = scheme_of(kind).activation in ("f8e4m3", "i8") or kind.pre_scales
        assert counts["trtc.quantize"] == int(is_quantized)
        of_layer = 3 + 2 * bool(kind.shared) if kind.experts else 4
        assert counts["trtc.linear"] == 2 * of_layer + 1


@pytest.mark.parametrize("scheme", ["fp8", "int8_sq", "fp8_dynamic"])
def test_what_makes_an_activation_quantises_it_in_delta_nets_with_experts(scheme: str) -> None:
    """Routers, routed experts and the gates of a delta net read norms as they are."""
    spec = decoder_spec(config_dict("qwen3_5_moe"), LIMITS.max_seq_len)
    named = SCHEMES[scheme]
    reader, quantization = dummy_checkpoint(spec, named)
    request = GraphRequest(named, "bf16", LIMITS, quantization, KV.page_size)
    result, _ = run_passes(build_graph(spec, request, reader), cuda_passes(named, reader))
    left = {node.name for node in nodes(result, "quantize")}
    counts = ops(result)
    assert counts["trtc.gated_delta"] and counts["trtc.paged_attention"]
    if scheme == "fp8_dynamic":
        # Programs of attention and of delta nets have a row's heads apart.
        assert {name.rsplit(".", 2)[1] for name in left} == {"out_proj"}
    else:
        assert not left


@pytest.mark.parametrize("kind", [Tiny("fp8"), Tiny("int4_awq", experts=4)], ids=str)
def test_the_same_module_gives_the_same_bytes(kind: Tiny) -> None:
    """Whether passes share an open module or each opens it for itself."""
    first, second = (lowered(kind)[1].model.SerializeToString(deterministic=True) for _ in range(2))
    assert first == second
    module, reader = tiny(kind)
    tables = tables_of(True)
    for step in cpu_passes(scheme_of(kind), reader, exact_activations=True, tables=tables):
        module, _ = step(module)
    assert module.model.SerializeToString(deterministic=True) == first


def test_the_given_module_is_not_altered() -> None:
    module, _ = tiny(Tiny("int8_sq", bias=True))
    bytes_before = module.model.SerializeToString(deterministic=True)
    recipes_before = dict(module.recipes)
    run_passes(module, NATIVE_PASSES)
    assert module.model.SerializeToString(deterministic=True) == bytes_before
    assert dict(module.recipes) == recipes_before


@pytest.mark.parametrize("scheme", ["fp32", "bf16", "fp8", "int4_awq", "w4a8_awq"])
@pytest.mark.parametrize("exact_head", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_narrow_activations_and_lm_head_are_choices(
    scheme: str, exact: bool, exact_head: bool
) -> None:
    kind = Tiny(scheme)
    module, reader = tiny(kind)
    passes = cpu_passes(
        scheme_of(kind), reader, exact_activations=exact, tables=tables_of(exact_head)
    )
    *layers, head = nodes(run_passes(module, passes)[0], "linear")
    narrows = scheme in ("fp8", "int4_awq", "w4a8_awq") and not exact_head
    assert (attributes(head)["weight_dtype"] == "i8") is narrows
    assert (attributes(head)["activation"] == "dynamic_i8") is (narrows and not exact)
    rounds = scheme in ("fp8", "int4_awq", "w4a8_awq") and not exact
    expected = "dynamic_i8" if rounds else "exact"
    assert {attributes(node)["activation"] for node in layers} == {expected}
    stored = {"fp8": "i8", "w4a8_awq": "i4"}
    if rounds and scheme in stored:
        assert {attributes(node)["weight_dtype"] for node in layers} == {stored[scheme]}
        assert len(layers) == 2 * 4 and "trtc.quantize" not in ops(lowered(kind, exact=False)[1])


@pytest.mark.parametrize("scheme", ["fp32", "bf16", "fp8", "int4_awq", "w4a8_awq"])
@pytest.mark.parametrize("exact_head", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_on_gpus_the_lm_head_is_int8_beside_4_bit_weights(
    scheme: str, exact_head: bool, ranks: int
) -> None:
    kind = Tiny(scheme, tied=True)
    module, reader = tiny(kind)
    passes = cuda_passes(scheme_of(kind), reader, ranks, tables=tables_of(exact_head))
    result, _ = run_passes(module, passes)
    head, lookup = nodes(result, "linear")[-1], nodes(result, "embedding")[0]
    narrows = scheme == "int4_awq" and not exact_head
    assert (attributes(head)["weight_dtype"] == "i8") is narrows
    assert ("table_scale" in given(lookup)) is narrows


@pytest.mark.parametrize("exact", [False, True])
def test_exact_weights_keep_all_bits_of_bf16(exact: bool) -> None:
    kind = Tiny("bf16")
    module, reader = tiny(kind)
    passes = cpu_passes(scheme_of(kind), reader, exact_activations=False, exact_weights=exact)
    result, _ = run_passes(module, passes)
    layouts = {attributes(node)["layout"] for node in nodes(result, "linear")}
    assert ("compact" in layouts) is not exact


def test_int8_with_equal_pre_scales_is_as_few_kernels_as_without() -> None:
    _, result = lowered(Tiny("int8_sq", pre_scales=True, equal_pre_scales=True))
    counts = ops(result)
    assert counts["trtc.quantize"] == 1 and counts["trtc.linear"] == 2 * 4 + 1
    fused = [*nodes(result, "paged_attention")[:1], *nodes(result, "swiglu")]
    assert all({"pre_scale", "out_scale"} <= set(given(node)) for node in fused)


@pytest.mark.parametrize("scheme", ["fp32", "int4_awq"])
def test_names_are_unique_and_requirements_are_met(scheme: str) -> None:
    named, reader = SCHEMES[scheme], tiny(Tiny())[1]
    for passes in (
        cpu_passes(named, reader, exact_activations=False),
        cuda_passes(named, reader, ranks=2),
    ):
        names = [step.name for step in passes]
        assert len(set(names)) == len(names)
        for index, step in enumerate(passes):
            assert step.requires <= set(names[:index])


def test_weights_of_a_large_model_are_never_loaded() -> None:
    """Reading any weight fails; a 32-layer graph goes through without one."""
    module, reader = tiny(Tiny("bf16", layers=32))
    reader.tensors.clear()
    reader.shapes.clear()
    result, _ = run_passes(
        module,
        cpu_passes(scheme_of(Tiny("bf16")), reader, exact_activations=True),
    )
    assert ops(result)["trtc.linear"] == 32 * 4 + 1

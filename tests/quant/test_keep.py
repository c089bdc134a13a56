"""`--keep`: which linears a glob leaves unquantised, and what is refused."""

import pytest

from trtc.protos.errors import RequestError
from trtc.quant.keep import kept_linears, parse_keep

LINEARS = [
    f"model.layers.{layer}.{name}"
    for layer in range(12)
    for name in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
]
EXPERTS = [
    f"model.layers.{layer}.mlp.experts.{expert}.{name}"
    for layer in range(2)
    for expert in range(3)
    for name in ("gate_proj", "up_proj", "down_proj")
]


def kept(*globs: str) -> list[str]:
    return [name.removeprefix("model.layers.") for name in kept_linears(globs, LINEARS)]


def test_a_name_keeps_its_linear_alone() -> None:
    assert kept("model.layers.1.mlp.down_proj") == ["1.mlp.down_proj"]
    assert kept("*.1.self_attn.o_proj", "*.2.mlp.down_proj") == [
        "1.self_attn.o_proj",
        "2.mlp.down_proj",
    ]
    assert len(kept("*.down_proj")) == 12


def test_linears_with_one_input_stay_alike() -> None:
    assert kept("*.3.self_attn.k_proj") == [f"3.self_attn.{x}_proj" for x in "qkv"]
    assert kept("*.3.mlp.up_proj") == ["3.mlp.gate_proj", "3.mlp.up_proj"]


def test_experts_of_a_layer_stay_alike() -> None:
    found = kept_linears(["*.1.mlp.experts.2.down_proj"], EXPERTS)
    assert found == tuple(name for name in EXPERTS if ".layers.1." in name)


def test_a_glob_without_a_match_names_near_ones() -> None:
    with pytest.raises(RequestError, match=r"no quantised linear.*layers\.3\.mlp\.down_proj"):
        kept("model.layers.3.mlp.down")
    with pytest.raises(RequestError, match="no quantised linear"):
        kept("*.down_proj", "lm_head")


def test_all_linears_are_too_many() -> None:
    with pytest.raises(RequestError, match="nothing is left to quantise"):
        kept("*")


@pytest.mark.parametrize("option", ["*.down_proj", "=bf16", "*.down_proj=", "*=fp8", "*=fp32"])
def test_another_form_or_type_is_refused(option: str) -> None:
    with pytest.raises(RequestError, match="--keep: is"):
        parse_keep([option])


def test_globs_may_hold_an_equals_sign() -> None:
    assert parse_keep(["a=b=bf16", "*.o_proj=bf16"]) == ("a=b", "*.o_proj")

"""Sites and their formats: names, sizes, and what does not fit."""

import pytest

from trtc.quant.site_format import BF16, FORMATS, narrowest, site_of


@pytest.mark.parametrize(
    ("linear", "site"),
    [
        ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.11.mlp.up_proj", "model.layers.11.mlp.gate_up_proj"),
        ("model.layers.11.mlp.down_proj", "model.layers.11.mlp.down_proj"),
        ("model.layers.2.mlp.experts.17.up_proj", "model.layers.2.mlp.experts"),
        ("model.layers.2.feed_forward.w2", "model.layers.2.feed_forward.w2"),
    ],
)
def test_linears_that_are_one_matrix_are_one_site(linear: str, site: str) -> None:
    assert site_of(linear) == site


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("int4_g128", 4.125),
        ("int4_g32", 4.5),
        ("iq4", 4.25),
        ("iq4_g16", 4.5),
        ("int6_g128", 6.125),
        ("int8_g128", 8.125),
        ("int8", 8 + 16 / 512),
        ("fp8", 8 + 16 / 512),
        ("bf16", 16),
    ],
)
def test_bits_of_a_weight_count_its_scales(name: str, bits: float) -> None:
    assert FORMATS[name].num_bits(64, 512) == bits * 64 * 512


def test_sizes_that_do_not_fit_are_explained() -> None:
    assert "96 input features" in FORMATS["int8_g128"].why_not(64, 96)
    assert "in pairs" in FORMATS["int4_g32"].why_not(3, 96)
    assert not FORMATS["int6_g128"].why_not(3, 128)
    assert not FORMATS["int4_g32"].why_not(64, 96)
    assert not FORMATS["fp8"].why_not(3, 5)


def test_narrowest() -> None:
    assert narrowest([BF16, FORMATS["fp8"], FORMATS["int4_g64"]]).name == "int4_g64"

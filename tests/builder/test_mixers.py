"""What a target, and a type of the KV cache, have no kernels for."""

from dataclasses import replace

import pytest

from tests.support.engines import config_dict
from trtc.builder.families.registry import decoder_spec
from trtc.builder.mixers import check_kv
from trtc.builder.spec import AttentionSpec, DecoderSpec
from trtc.builder.targets.cpu import CpuTarget
from trtc.protos.errors import UnsupportedError


def with_heads_of(head_dim: int) -> DecoderSpec:
    spec = decoder_spec(config_dict("llama"), 256)
    layers = []
    for layer in spec.layers:
        assert isinstance(layer.mixer, AttentionSpec)
        layers.append(replace(layer, mixer=replace(layer.mixer, head_dim=head_dim)))
    return replace(spec, layers=tuple(layers))


def test_heads_of_an_odd_number_of_elements_are_refused_in_4_bits() -> None:
    target = CpuTarget(("generic",))
    check_kv(with_heads_of(15), "i8", target)
    check_kv(with_heads_of(16), "i4", target)
    with pytest.raises(UnsupportedError, match="heads of 15 elements are not whole") as it:
        check_kv(with_heads_of(15), "i4", target)
    assert it.value.field == "--kv-dtype"

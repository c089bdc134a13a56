"""Random weights that keep every number finite, the same on every machine."""

import hashlib

import ml_dtypes
import numpy as np
import pytest

from trtc.protos.dtypes import DTypeName
from trtc.protos.plan import Fill, Weight
from trtc.runtime.executors.dummy_weights import fill_weights

GOLDEN = "9628b11794144a2ddee199ee6c281c3db067a82a6395c2386593acf2f963257d"


def weight_of(name: str, offset: int, size: int, fill: Fill) -> Weight:
    return Weight(
        name=name, dtype="u8", shape=(size,), layout="x", offset=offset, bytes=size, fill=fill
    )


def test_values_follow_their_rule() -> None:
    rules = [
        Fill(element="f32", center=1.0),
        Fill(element="f32", spread=0.5),
        Fill(element="bf16", spread=2.0),
        Fill(element="f8e4m3"),
        Fill(element="u8"),
    ]
    size = 1 << 16
    weights = [weight_of(str(i), i * size, size, rule) for i, rule in enumerate(rules)]
    area = fill_weights(weights, len(rules) * size)
    assert area.ctypes.data % 64 == 0 and len(area) == len(rules) * size
    parts = [area[i * size : (i + 1) * size] for i in range(len(rules))]
    assert (parts[0].view(np.float32) == 1).all()
    uniform = parts[1].view(np.float32)
    assert -0.5 <= uniform.min() < -0.45 and 0.45 < uniform.max() <= 0.5
    assert abs(parts[2].view(ml_dtypes.bfloat16).astype(np.float32)).max() <= 2
    e4m3 = parts[3].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.isfinite(e4m3).all() and abs(e4m3).max() < 2 and e4m3.std() > 0.3
    assert parts[4].max() == 15 and len(np.unique(parts[4])) == 16


@pytest.mark.parametrize("element", ["i8", "i4", "u4"])
def test_integers_are_random_bits(element: DTypeName) -> None:
    area = fill_weights([weight_of("w", 0, 1 << 16, Fill(element=element))], 1 << 16)
    assert len(np.unique(area)) == 256


def test_large_tensors_repeat_and_every_byte_is_filled() -> None:
    size = (9 << 20) + 12
    area = fill_weights([weight_of("w", 64, size, Fill(element="f32", center=2.0))], size + 128)
    assert not area[:64].any() and not area[64 + size :].any()
    assert (area[64 : 64 + size].view(np.float32) == 2).all()


def test_the_bytes_are_the_same_everywhere() -> None:
    area = fill_weights([weight_of("w", 0, 4096, Fill(element="i8"))], 4096)
    assert hashlib.sha256(area.tobytes()).hexdigest() == GOLDEN

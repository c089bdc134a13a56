"""Codes of rounded weights in words, against words that are put together bit by bit."""

import numpy as np
import pytest
import torch

from tests.support.packed_words import pack_words
from tests.support.torch_gpu import needs_torch_gpu
from trtc.quant.code_grid import GRIDS
from trtc.quant.packed_codes import pack_codes, unpack_codes
from trtc.quant.site_format import FORMATS, SiteFormat

ROWS, COLUMNS = 5, 64
NUMBERS = {**{name: grid.numbers for name, grid in GRIDS.items()}, "i8": tuple(range(-128, 128))}
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def _two_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtc.quant.packed_codes._BYTES_AT_ONCE", 2 * COLUMNS // 2)


def on(device: str, tensor: torch.Tensor) -> torch.Tensor:
    if device == "cuda":
        needs_torch_gpu()
    return tensor.to(device)


def case(to: SiteFormat) -> tuple[torch.Tensor, np.ndarray]:
    """Numbers of a grid, every one of them, and the words of their places in it."""
    numbers = np.array(NUMBERS[to.weight], np.int8)
    places = np.random.default_rng(3).permutation(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    places %= len(numbers)
    return torch.from_numpy(numbers[places]), pack_words(places.astype(np.uint8), to.code_bits, 1)


@DEVICES
@pytest.mark.parametrize("name", ["int4_g128", "iq4", "int6_g128", "int8_g128"])
def test_words_hold_the_places_of_numbers(name: str, device: str) -> None:
    codes, words = case(FORMATS[name])
    found = pack_codes(on(device, codes), FORMATS[name])
    assert found.device.type == device
    np.testing.assert_array_equal(found.cpu().numpy(), words)
    across = codes.T.contiguous().T
    assert torch.equal(pack_codes(on(device, across), FORMATS[name]), found)


@DEVICES
@pytest.mark.parametrize("name", ["int4_g128", "iq4", "int6_g128"])
def test_words_are_read_as_the_numbers(name: str, device: str) -> None:
    codes, words = case(FORMATS[name])
    found = unpack_codes(on(device, torch.from_numpy(words)), FORMATS[name])
    assert found.device.type == device
    assert torch.equal(found.cpu(), codes)


def test_what_does_not_fill_a_word_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="7 codes do not fill words"):
        pack_codes(torch.zeros(1, 7, dtype=torch.int8), FORMATS["iq4"])

"""Codes of rounded weights in words of 32 bits, as checkpoints and journals store them."""

from collections.abc import Iterator

import torch

from trtc.quant.code_grid import GRIDS
from trtc.quant.pack import sixes_of_three, three_of_sixes
from trtc.quant.site_format import SiteFormat

_BYTES_AT_ONCE = 1 << 20
"""Of packed codes."""


def pack_codes(codes: torch.Tensor, to: SiteFormat) -> torch.Tensor:
    """i32 [N, K * bits / 32] of codes [N, K] i8 that are numbers of an integer format's grid, on
    their device; those of a row fill whole words.

    Codes count the numbers from the first: of integers, they are two's complement with an offset.
    """
    assert codes.shape[1] * to.code_bits % 32 == 0, f"{codes.shape[1]} codes do not fill words"
    if to.code_bits == 8:
        return (codes.contiguous().view(torch.uint8) + 128).view(torch.int32)
    shape = (len(codes), codes.shape[1] * to.code_bits // 8)
    stored = codes.new_empty(shape, dtype=torch.uint8)
    packed = _bytes_of_sixes if to.code_bits == 6 else _bytes_of_nibbles
    numbers = _numbers(to, codes.device)
    for part, some in _parts(stored, codes.contiguous()):
        part.copy_(packed(some, numbers))
    return stored.view(torch.int32)


def unpack_codes(words: torch.Tensor, to: SiteFormat) -> torch.Tensor:
    """The inverse of `pack_codes`, of 4 and 6 bits, on the device of the words."""
    stored = words.view(torch.uint8)
    codes = stored.new_empty((len(stored), stored.shape[1] * 8 // to.code_bits), dtype=torch.int8)
    unpacked = _sixes if to.code_bits == 6 else _nibbles
    numbers = _numbers(to, words.device)
    for some, part in _parts(stored, codes):
        part.copy_(unpacked(some, numbers))
    return codes


def _numbers(to: SiteFormat, device: torch.device) -> torch.Tensor:
    """By code, i8."""
    return torch.tensor(GRIDS[to.weight].numbers, dtype=torch.int8, device=device)


def _parts(
    stored: torch.Tensor, codes: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Some rows of both at a time."""
    rows = max(1, _BYTES_AT_ONCE // stored.shape[1])
    return zip(torch.split(stored, rows), torch.split(codes, rows), strict=True)


def _bytes_of_nibbles(codes: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The inverse of `_nibbles`, by a table of all pairs of bytes."""
    code_of = torch.zeros(256, dtype=torch.uint8, device=codes.device)
    code_of[numbers.view(torch.uint8).long()] = torch.arange(16, device=codes.device).byte()
    pairs = code_of.repeat(256) | code_of.repeat_interleave(256) << 4
    which = codes.view(torch.int16).to(torch.int32) & 0xFFFF
    return pairs.index_select(0, which.flatten()).view(which.shape)


def _bytes_of_sixes(codes: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The inverse of `_sixes`."""
    bare = (codes - numbers[0]).view(torch.uint8).view(len(codes), -1, 4)
    threes = three_of_sixes(*(one.contiguous() for one in bare.unbind(-1)))
    return torch.stack(threes, -1).flatten(1)


def _nibbles(stored: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The numbers [N, 2 B] of codes of 4 bits in bytes [N, B], by a table of all bytes."""
    pairs = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), -1).view(torch.int16)
    found = pairs.flatten().index_select(0, stored.flatten().to(torch.int32))
    return found.view(torch.int8).view(len(stored), -1)


def _sixes(stored: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The numbers [N, 4 B / 3] of codes of 6 bits in bytes [N, B]: consecutive ones."""
    threes = (one.contiguous() for one in stored.view(len(stored), -1, 3).unbind(-1))
    codes = stored.new_empty((len(stored), stored.shape[1] // 3, 4))
    for place, code in enumerate(sixes_of_three(*threes)):
        codes[..., place] = code
    return codes.view(torch.int8).flatten(1).add_(numbers[0])

"""Codes of rounded weights in words of 32 bits, as checkpoints and journals store them."""

import torch

from trtc.plugins.iq4 import codes_of
from trtc.quant.code_grid import GRIDS
from trtc.quant.pack import pack_words, sixes_of_three
from trtc.quant.site_format import SiteFormat

_BYTES_AT_ONCE = 1 << 20


def pack_codes(codes: torch.Tensor, to: SiteFormat) -> torch.Tensor:
    """i32 [N, K * bits / 32] of codes [N, K] i8 that are numbers of an integer format's grid, on
    the CPU; those of a row fill whole words."""
    if to.weight == "iq4":
        bare = codes_of(codes.numpy())
    else:
        # Two's complement with an offset, which wraps around.
        bare = (codes.view(torch.uint8) + (1 << (to.code_bits - 1))).numpy()
    return torch.from_numpy(pack_words(bare, to.code_bits, axis=1))


def unpack_codes(words: torch.Tensor, to: SiteFormat) -> torch.Tensor:
    """The inverse of `pack_codes`, of 4 and 6 bits, on the device of the words."""
    stored = words.view(torch.uint8)
    codes = stored.new_empty((len(stored), stored.shape[1] * 8 // to.code_bits), dtype=torch.int8)
    unpacked = _sixes if to.code_bits == 6 else _nibbles
    numbers = torch.tensor(GRIDS[to.weight].numbers, dtype=torch.int8, device=words.device)
    rows = max(1, _BYTES_AT_ONCE // stored.shape[1])
    for part, some in zip(*(torch.split(one, rows) for one in (codes, stored)), strict=True):
        part.copy_(unpacked(some, numbers))
    return codes


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

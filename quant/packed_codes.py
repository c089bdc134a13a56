"""Codes of rounded weights in words of 32 bits, as checkpoints and journals store them."""

import torch

from trtc.plugins.iq4 import codes_of, values_of
from trtc.quant.pack import pack_words, unpack_words
from trtc.quant.site_format import SiteFormat


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
    """The inverse of `pack_codes`."""
    bare = unpack_words(words.numpy(), to.code_bits, axis=1)
    if to.weight == "iq4":
        return torch.from_numpy(values_of(bare))
    return (torch.from_numpy(bare) - (1 << (to.code_bits - 1))).view(torch.int8)

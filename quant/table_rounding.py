"""An lm_head or a table of embeddings, rounded to nearest: in 4 and 6 bits with searched scales."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trtc.plugins.iq4 import codes_of
from trtc.protos.errors import CheckpointError
from trtc.quant.code_grid import GRIDS
from trtc.quant.gptq import Rounded, search_scales
from trtc.quant.nearest import round_to_nearest
from trtc.quant.site_format import SiteFormat

_SLICE_ELEMENTS = 1 << 22
Array = NDArray[Any]


def round_table(weight: torch.Tensor, to: SiteFormat) -> Rounded:
    """Round a table [N, K] to codes and scales on its device, some rows at a time.

    Rows of 4 bits have a unit of scales each: those of rare tokens are small.

    Args:
        weight: of any floating-point type, K a multiple of the format's groups.
    """
    rows = max(1, _SLICE_ELEMENTS // weight.shape[1])
    parts = [_rounded(part.float(), to) for part in torch.split(weight, rows)]
    return Rounded(
        torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    )


def _rounded(weight: torch.Tensor, to: SiteFormat) -> Rounded:
    grid = GRIDS.get(to.weight)
    if grid is None:
        return round_to_nearest(weight, to)
    assert to.group_size is not None
    scales, _ = search_scales(weight, to.group_size, grid, by_row=True)
    groups = weight.reshape(*scales.shape, -1)
    numbers = grid.round(groups / scales[..., None]).to(torch.int8).reshape(weight.shape)
    return Rounded(numbers, scales)


def searched_table(weight: Array, to: SiteFormat) -> tuple[Array, Array]:
    """Codes [N, K], of iq4 those of plugins/iq4.py in u8, else int8, and scales
    [N, K / group_size] f32, of a table in a format with searched scales.

    Raises:
        CheckpointError: a value is NaN or infinite.
    """
    values = torch.from_numpy(weight.astype(np.float32))
    if not bool(values.isfinite().all()):
        raise CheckpointError(
            "a weight holds NaN or infinity", remedy="Quantise the checkpoint again"
        )
    rounded = _rounded(values, to)
    numbers = rounded.codes.numpy()
    return codes_of(numbers) if to.weight == "iq4" else numbers, rounded.scales.numpy()

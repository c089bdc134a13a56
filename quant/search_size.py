"""How much memory and disk a search for recipes takes."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtc.protos.errors import EnvironmentFault
from trtc.quant.evaluation import MAX_TOKENS
from trtc.quant.gptq_memory import gptq_bytes
from trtc.quant.journal import stored_bytes
from trtc.quant.linears import linear_shapes, table_shape
from trtc.quant.recipe_path import Shapes
from trtc.quant.reference_model import empty_model, layer_prefixes, load_config, reference_dtype
from trtc.quant.rounded_sites import SEARCHED, fitting_formats
from trtc.quant.site_format import FORMATS, TABLES
from trtc.quant.site_scores import SCORED_TOKENS

_F32, _BF16 = 4, 2
_STREAMS = 2
"""Of the calibration text."""


@dataclass(frozen=True)
class SearchSize:
    """Estimates, from shapes alone."""

    memory: int
    """Bytes beside the weights."""
    disk: int
    """Bytes of rounded weights and of hidden states."""


def search_size(model_dir: Path, tables: Sequence[str], num_tokens: int) -> SearchSize:
    """What a search takes. No weights are read.

    Args:
        tables: sites of tables that get a format as well.
        num_tokens: of the calibration text, at most.

    Raises:
        CheckpointError, UnsupportedError: as `linear_shapes`.
    """
    model = empty_model(load_config(model_dir))
    linears = linear_shapes(model_dir)
    shapes = {**linears, **dict.fromkeys(tables, table_shape(model_dir))}
    codes = max(
        _codes({name: one for name, one in linears.items() if name.startswith(prefix)})
        for prefix in layer_prefixes(model)
    )
    rounding = gptq_bytes(model_dir, dict.fromkeys(linears, FORMATS["int4_g128"]), num_tokens)
    element = _F32 if reference_dtype(model_dir) == "float32" else _BF16
    hidden_size: int = model.config.get_text_config().hidden_size
    inputs = len(layer_prefixes(model)) * min(num_tokens, SCORED_TOKENS) * element
    # Each rounding leaves its last ones, and writes some before those before are removed.
    rounded = sum(FORMATS[name].is_gptq for name in SEARCHED) + 1
    streams = rounded * (_STREAMS * num_tokens + MAX_TOKENS) * _F32
    return SearchSize(max(rounding, codes), _stored(shapes) + hidden_size * (inputs + streams))


def check_room(directory: Path, size: SearchSize) -> None:
    """Refuse a file system without room for what a search writes, files of one before counted.

    Raises:
        EnvironmentFault: says how much is missing.
    """
    there = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    existing = next(path for path in (directory, *directory.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free + there
    if free < size.disk:
        raise EnvironmentFault(
            f"the search for a recipe takes about {size.disk / 1e9:.1f} GB of disk, and "
            f"{free / 1e9:.1f} GB are free",
            field=str(existing),
            remedy="Free some, or choose another place",
        )


def _codes(shapes: Shapes) -> int:
    """Of linears in all formats, in memory: a byte each."""
    fitting = fitting_formats(shapes)
    return sum(shapes[name][0] * shapes[name][1] for fits in fitting.values() for name in fits)


def _stored(shapes: Shapes) -> int:
    """Of what is not rounded anew, on disk."""
    return sum(
        stored_bytes(FORMATS[to], *shapes[name])
        for to, fits in fitting_formats(shapes).items()
        for name in fits
        if FORMATS[to].is_gptq or name in TABLES
    )

"""How much memory and disk a search for recipes takes."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtc.protos.errors import EnvironmentFault
from trtc.quant.calibration_text import WINDOW
from trtc.quant.evaluation import MAX_TOKENS
from trtc.quant.gptq import VALUES_AT_ONCE
from trtc.quant.gptq_memory import gptq_bytes
from trtc.quant.layerwise import rows_at_once
from trtc.quant.linears import linear_shapes, table_shape
from trtc.quant.recipe_path import Shapes
from trtc.quant.recipe_search import MOST_MODELS, most_tokens
from trtc.quant.reference_model import empty_model, layer_prefixes, load_config, reference_dtype
from trtc.quant.rounded_layers import stored_bytes
from trtc.quant.rounded_sites import SEARCHED, fitting_formats
from trtc.quant.site_format import FORMATS, TABLES, SiteFormat
from trtc.quant.site_scores import SCORED_TOKENS

_F64, _F32, _BF16 = 8, 4, 2
_STREAMS = 2
"""Of the calibration text."""
_SCORED_STREAMS = 3
"""Before and after the layers, and gradients."""
_LOGITS = 5
"""Copies of logits in f32, while they are drawn from and gone back through."""
_VALUES = 3
"""Copies of a part of a table in f32, while it is compared with what it was."""


@dataclass(frozen=True)
class SearchSize:
    """Estimates, from shapes alone."""

    memory: int
    """Bytes beside a decoder layer."""
    others: int
    """Bytes beside what is outside the layers, before and after them."""
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
    prefixes = layer_prefixes(empty_model(load_config(model_dir)))
    linears, table = linear_shapes(model_dir), table_shape(model_dir)
    shapes = {**linears, **dict.fromkeys(tables, table)}
    codes = max(
        _codes({name: one for name, one in linears.items() if name.startswith(prefix)})
        for prefix in prefixes
    )
    rounding = gptq_bytes(model_dir, dict.fromkeys(linears, FORMATS["int4_g128"]), num_tokens)
    element = _F32 if reference_dtype(model_dir) == "float32" else _BF16
    vocab_size, hidden_size = table
    scored = min(num_tokens, SCORED_TOKENS)
    # Each rounding leaves its last ones, and writes some before those before are removed.
    rounded = sum(FORMATS[name].is_gptq for name in SEARCHED) + 1
    streams = rounded * (_STREAMS * num_tokens + MAX_TOKENS) * _F32
    measured = min(most_tokens(vocab_size), MAX_TOKENS)
    models = measured * (MOST_MODELS * hidden_size * element + _F64 * vocab_size)
    gradients = _SCORED_STREAMS * scored * hidden_size * element
    of_one = dict.fromkeys(tables[:1], table)
    return SearchSize(
        max(rounding, codes + models),
        _logits(vocab_size) + max(_scored(of_one) + gradients, _replaced(of_one, element) + models),
        _stored(shapes) + hidden_size * (len(prefixes) * scored * element + streams),
    )


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
    """Of weights in all formats, in memory."""
    return sum(_code_bytes(to, *shape) for to, shape in _fitting(shapes))


def _logits(vocab_size: int) -> int:
    """Of logits at work."""
    return _LOGITS * _F32 * vocab_size * min(WINDOW, rows_at_once(vocab_size))


def _scored(table: Shapes) -> int:
    """Of a table in all formats, each compared with what it was."""
    return _codes(table) + _values(table)


def _replaced(table: Shapes, element: int) -> int:
    """Of a table that has the values of codes in place of its own, which are kept."""
    codes = max((_code_bytes(to, *shape) for to, shape in _fitting(table)), default=0)
    return codes + _values(table) + element * _elements(table)


def _values(table: Shapes) -> int:
    """Of a part of it in f32."""
    return _VALUES * _F32 * min(_elements(table), VALUES_AT_ONCE)


def _elements(shapes: Shapes) -> int:
    return sum(rows * columns for rows, columns in shapes.values())


def _fitting(shapes: Shapes) -> Iterator[tuple[SiteFormat, tuple[int, int]]]:
    """Every format with the shape of every weight that it fits."""
    for to, fits in fitting_formats(shapes).items():
        for name in fits:
            yield FORMATS[to], shapes[name]


def _code_bytes(to: SiteFormat, rows: int, columns: int) -> int:
    """A byte a weight, and scales in f32."""
    return rows * (columns + _F32 * (columns // to.group_size if to.group_size else 1))


def _stored(shapes: Shapes) -> int:
    """Of what is not rounded anew, on disk."""
    return sum(
        stored_bytes(FORMATS[to], *shapes[name])
        for to, fits in fitting_formats(shapes).items()
        for name in fits
        if FORMATS[to].is_gptq or name in TABLES
    )

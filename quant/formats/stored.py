"""What every format reader needs: stored tensors checked by name, and scales in canonical shape."""

import re
import reprlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from trtc.protos.errors import CheckpointError, UnsupportedError
from trtc.quant.scheme import TensorSource

Array = NDArray[Any]
Shape = tuple[int, ...]
CONFIG_FIELD = "quantization_config"
"""Field of errors of the config, where its file is not known."""
SCALE_DTYPES = ("F32", "BF16", "F16")
_BLOCK_SCALE_DTYPES = (*SCALE_DTYPES, "F8_E8M0")
_MAX_SHOWN = 160
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80
_KV_SCALE = re.compile(r"\.layers\.(\d+)\.self_attn\.(?:\w+\.)?([kv])_scale$")


class StoredTensors:
    """The tensors of a checkpoint by name, as its headers describe them; no data is read.

    Args:
        tensors: name -> (element type as safetensors spells it, shape).
    """

    def __init__(self, tensors: Mapping[str, tuple[str, Shape]]) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def dtype(self, name: str) -> str:
        return self._tensors[name][0]

    def shape(self, name: str) -> Shape:
        return self._tensors[name][1]

    def prefixes(self, suffix: str) -> tuple[str, ...]:
        """Every `p`, sorted, of which the tensor `p.suffix` exists."""
        end = f".{suffix}"
        return tuple(sorted(n.removesuffix(end) for n in self._tensors if n.endswith(end)))

    def require(self, name: str, dtypes: tuple[str, ...], *shapes: Shape) -> Shape:
        """The shape of a tensor that must exist, of one of `dtypes` and (if given) of `shapes`.

        Raises:
            CheckpointError: it does not, and how.
        """
        if name not in self._tensors:
            raise CheckpointError(
                "the tensor is missing, though its module is quantised",
                field=name,
                remedy="Export the checkpoint again; without it the weights mean nothing",
            )
        dtype, shape = self._tensors[name]
        if dtype not in dtypes:
            raise CheckpointError(
                f"has element type {dtype}, its format stores {' or '.join(dtypes)}", field=name
            )
        if shapes and shape not in shapes:
            wanted = " or ".join(str(list(wanted)) for wanted in dict.fromkeys(shapes))
            raise CheckpointError(
                f"has shape {list(shape)} where the weight needs {wanted}", field=name
            )
        return shape

    def matrix(self, name: str, *dtypes: str) -> tuple[int, int]:
        """The shape of a tensor that must be a matrix of one of `dtypes`."""
        shape = self.require(name, dtypes)
        if len(shape) != 2 or 0 in shape:
            raise CheckpointError(f"has shape {list(shape)}, not a matrix's", field=name)
        return shape[0], shape[1]

    def scalar(self, name: str) -> TensorSource:
        """A scale that must exist, as () f32."""
        self.require(name, SCALE_DTYPES, (), (1,), (1, 1))
        return TensorSource((name,), scalar_f32)

    def group_scale(
        self, name: str, rows: int, columns: int, group_size: int | None
    ) -> TensorSource:
        """A scale [N, G] f32 that must exist; `group_size` None: one a row or one a tensor."""
        if group_size is None:
            shape = self.require(name, SCALE_DTYPES, (), (1,), (1, 1), (rows,), (rows, 1))
            one = shape in ((), (1,), (1, 1))
            return TensorSource((name,), matrix_of_one if one else column_f32)
        self.require(name, SCALE_DTYPES, (rows, num_groups(name, columns, group_size)))
        return TensorSource((name,), as_f32)

    def exponent_scale(self, name: str, rows: int, columns: int, group_size: int) -> TensorSource:
        """A scale [N, G] that must exist as E8M0, as f32."""
        self.require(name, ("U8", "F8_E8M0"), (rows, num_groups(name, columns, group_size)))
        return TensorSource((name,), powers_of_two)

    def kv_scales(self) -> dict[str, TensorSource]:
        """`k:<layer>`, `v:<layer>` -> () f32, of whatever KV scales the checkpoint has."""
        found = {}
        for name in sorted(self._tensors):
            if match := _KV_SCALE.search(name):
                found[f"{match[2]}:{match[1]}"] = self.scalar(name)
        return found


def num_groups(name: str, columns: int, group_size: int) -> int:
    """Groups along K.

    Raises:
        UnsupportedError: the last group is not full.
    """
    if columns % group_size:
        raise UnsupportedError(
            f"{columns} input features are no multiple of the group size {group_size}",
            field=name,
            remedy="Quantise with a group size that divides every linear's input features",
        )
    return columns // group_size


def shown(value: object) -> str:
    """A value of a config as an error says it: its beginning, if it is long."""
    text = _SHOWN.repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def unsupported(field: str, value: object, known: str) -> UnsupportedError:
    """An error that names a quantisation field, its value and what would be understood."""
    return UnsupportedError(
        f"is {shown(value)}, which trtc does not read",
        field=f"{CONFIG_FIELD}.{field}",
        remedy=f"It reads {known}. Or build from the unquantised checkpoint with --dtype",
    )


def excluded(prefix: str) -> CheckpointError:
    """An error that names a quantised module that the config leaves out."""
    return CheckpointError(
        "is quantised in the weights, but the quantization config excludes it",
        field=prefix,
        remedy="Config and weights are not of one export: download or export both again",
    )


def expect(config: Mapping[str, Any], field: str, *allowed: object, default: object = None) -> Any:
    """The value of a field that must be one of `allowed`.

    Raises:
        UnsupportedError: it is another.
    """
    value = config.get(field, default)
    # bool is an int to Python: `desc_act: 1` is not what any exporter writes.
    if not any(value == known and type(value) is type(known) for known in allowed):
        raise unsupported(field, value, " or ".join(repr(known) for known in allowed))
    return value


def mapping(config: Mapping[str, Any], field: str, parent: str = "") -> Mapping[str, Any]:
    """A field that must be an object, or null, or absent; the latter two are the empty one.

    Raises:
        UnsupportedError: it is something else.
    """
    value = config.get(field)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise unsupported(f"{parent}{field}", value, "an object")
    return value


def positive_size(field: str, value: Any) -> int:
    """A size that must be a positive number.

    Raises:
        UnsupportedError: it is something else.
    """
    if not _positive(value):
        raise unsupported(field, value, "a positive number")
    assert isinstance(value, int)
    return value


def block_size(field: str, value: Any) -> tuple[int, int] | None:
    """The [rows, columns] that share a scale; None: whole rows or the whole tensor do."""
    if value is None:
        return None
    if not (isinstance(value, list) and len(value) == 2 and all(_positive(v) for v in value)):
        raise unsupported(field, value, "two positive numbers")
    return value[0], value[1]


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def block_scale(
    stored: StoredTensors, name: str, rows: int, columns: int, block: tuple[int, int]
) -> tuple[TensorSource, int | None]:
    """A scale a block of rows and columns, as a scale a row and group, and the group's size."""
    across = -(-columns // block[1])
    stored.require(name, _BLOCK_SCALE_DTYPES, (-(-rows // block[0]), across))
    expand = partial(rows_of_blocks, rows=rows, block_rows=block[0])
    if across == 1:
        return TensorSource((name,), expand), None
    num_groups(name, columns, block[1])
    return TensorSource((name,), expand), block[1]


def rows_of_blocks(scale: Array, *, rows: int, block_rows: int) -> Array:
    """[N, G] f32 of scales [N / block_rows, G]."""
    return np.repeat(scale.astype(np.float32), min(block_rows, rows), axis=0)[:rows]


def as_f32(array: Array) -> Array:
    return array.astype(np.float32)


def powers_of_two(array: Array) -> Array:
    """f32 of E8M0, which safetensors may call U8: 2^(bits - 127), and NaN of 255."""
    values: Array = array.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return values


def scalar_f32(array: Array) -> Array:
    return array.astype(np.float32).reshape(())


def matrix_of_one(array: Array) -> Array:
    return array.astype(np.float32).reshape(1, 1)


def column_f32(array: Array) -> Array:
    return array.astype(np.float32).reshape(-1, 1)

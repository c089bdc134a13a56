"""Writes weights.safetensors tensor by tensor, at the alignment that kernels need.

The file is plain safetensors: any reader of that format opens it. Kernels want 64-byte aligned
tensors and the format allows no gaps, so gaps are tensors too (`pad.<n>`), and the header is padded
with the spaces that the format allows until the data section itself is aligned.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from trtc.builder.memory import ALIGNMENT, align
from trtc.builder.recipes import Recipe, TensorReader, load_ranks
from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.protos.dtypes import DTYPES
from trtc.protos.errors import InvariantError, OutputError
from trtc.protos.manifest import WEIGHTS_FILE
from trtc.protos.plan import Weight
from trtc.protos.progress import Progress, Step

_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its JSON header, little-endian."""


def header(weights: Sequence[Weight]) -> bytes:
    """Everything before the data section; its length is a multiple of 64."""
    entries: dict[str, Any] = {"__metadata__": {"format": "trtc", "alignment": str(ALIGNMENT)}}
    end = 0
    for number, weight in enumerate(weights):
        if weight.offset > end:
            entries[f"pad.{number}"] = _entry("U8", [weight.offset - end], end, weight.offset)
        end = weight.offset + weight.bytes
        dtype = DTYPES[weight.dtype]
        shape = [weight.bytes] if dtype.bits < 8 else list(weight.shape)
        entries[weight.name] = _entry(dtype.safetensors, shape, weight.offset, end)
    if align(end) > end:
        entries["pad.end"] = _entry("U8", [align(end) - end], end, align(end))
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (align(_LENGTH_BYTES + len(text)) - _LENGTH_BYTES - len(text))
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_weights(
    paths: Sequence[Path],
    weights: Sequence[Weight],
    recipes: Mapping[str, Recipe],
    reader: TensorReader,
    progress: Progress,
) -> None:
    """Make and write one tensor at a time: memory stays near the size of the largest.

    Args:
        paths: one file a rank. What the ranks' tensors are cut from is made once.

    Raises:
        OutputError: the disk has too little room; said before the first byte is written.
        CheckpointError: a tensor cannot be read.
    """
    head = header(weights)
    size = len(head) + (align(weights[-1].offset + weights[-1].bytes) if weights else 0)
    free = shutil.disk_usage(paths[0].parent).free
    if free < size * len(paths):
        raise OutputError(
            f"the weights need {size * len(paths) / 1e9:.2f} GB and the disk has "
            f"{free / 1e9:.2f} GB free",
            field="--output",
            remedy="Free some space, or write to another disk",
        )
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in paths]
        for file in files:
            file.write(head)
        for number, weight in enumerate(weights, 1):
            progress(Step("writing weights", number, len(weights), "tensors"))
            arrays = load_ranks(recipes[weight.name], len(files), reader)
            for file, array in zip(files, arrays, strict=True):
                file.write(bytes(len(head) + weight.offset - file.tell()))
                file.write(_encode(array, weight))
        for file in files:
            file.write(bytes(size - file.tell()))


def _encode(array: NDArray[Any], weight: Weight) -> memoryview:
    """The tensor's bytes; 4-bit values two a byte, the first in the low nibble, as in ONNX."""
    expected = NUMPY_DTYPES[weight.dtype]
    if array.shape != weight.shape or array.dtype != expected:
        raise InvariantError(
            f"its recipe gave {array.dtype}{list(array.shape)}, the graph says "
            f"{expected}{list(weight.shape)}",
            field=weight.name,
        )
    flat = np.ascontiguousarray(array).reshape(-1)
    if DTYPES[weight.dtype].bits == 4:
        nibbles = flat.view(np.uint8) & 0xF
        nibbles = np.append(nibbles, np.zeros(len(nibbles) % 2, np.uint8))
        flat = nibbles[0::2] | (nibbles[1::2] << 4)
    return flat.view(np.uint8).data


def with_external_weights(
    model: onnx.ModelProto, weights: Sequence[Weight], location: str = WEIGHTS_FILE
) -> onnx.ModelProto:
    """The graph with its initialisers pointing into the weights' file.

    Initialisers that no kernel reads (sizes of a Split) stay inline; unused ones are dropped.
    """
    data_start = len(header(weights))
    places = {weight.name: weight for weight in weights}
    result = onnx.ModelProto()
    result.CopyFrom(model)
    used = {name for node in result.graph.node for name in node.input}
    kept = [tensor for tensor in result.graph.initializer if tensor.name in used]
    del result.graph.initializer[:]
    for tensor in kept:
        if (weight := places.get(tensor.name)) is not None:
            tensor = _external(tensor, location, data_start + weight.offset, weight.bytes)
        result.graph.initializer.append(tensor)
    return result


def _external(
    tensor: onnx.TensorProto, location: str, offset: int, length: int
) -> onnx.TensorProto:
    reference = onnx.TensorProto(
        name=tensor.name,
        data_type=tensor.data_type,
        dims=tensor.dims,
        data_location=onnx.TensorProto.EXTERNAL,
    )
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        reference.external_data.add(key=key, value=str(value))
    return reference

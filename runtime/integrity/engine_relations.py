"""Checks an engine's files against each other, before their values are used as sizes or indices.

Matching hashes prove that files are undamaged, not that they were written correctly.
"""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from trtc.protos.dtypes import DTYPES
from trtc.protos.errors import EngineCorruptError
from trtc.protos.files import UnreadableError, decode_json, open_regular
from trtc.protos.manifest import MANIFEST_FILE, PLAN_FILE, Manifest
from trtc.protos.plan import Plan, Weight
from trtc.runtime.integrity.engine_files import REBUILD

_ALIGNMENT = 64
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""


class _Entry(msgspec.Struct):
    data_offsets: tuple[int, int]


def check_plan(manifest: Manifest, plan: Plan) -> None:
    """Compare plan.json with the manifest, and its weights with their own bounds.

    Raises:
        EngineCorruptError: they contradict each other; the message names the field.
    """
    for field, found, expected in _pairs(manifest, plan):
        if found != expected:
            raise EngineCorruptError(
                f"is {found}, and {PLAN_FILE} says {expected}",
                field=f"{MANIFEST_FILE}: {field}",
                remedy=REBUILD,
            )
    for weight in plan.weights:
        _check_weight(weight, plan.weights_bytes)


def _pairs(manifest: Manifest, plan: Plan) -> Iterator[tuple[str, object, object]]:
    yield "model.vocab_size", manifest.model.vocab_size, plan.vocab_size
    yield "ledger.weights", manifest.ledger.weights, plan.weights_bytes
    for part in ("kv", "limits"):
        ours, theirs = getattr(manifest, part), getattr(plan, part)
        for field in ours.__struct_fields__:
            found, expected = getattr(ours, field), getattr(theirs, field)
            if field == "max_batch_size":
                expected = min(found, expected)  # a plan may have more rows, for drafts
            yield f"{part}.{field}", found, expected


def _check_weight(weight: Weight, num_bytes: int) -> None:
    needed = DTYPES[weight.dtype].num_bytes(math.prod(weight.shape))
    problem = ""
    if weight.offset % _ALIGNMENT:
        problem = f"is at {weight.offset}, no multiple of {_ALIGNMENT}"
    elif weight.offset + weight.bytes > num_bytes:
        problem = f"ends at {weight.offset + weight.bytes}, and the weights at {num_bytes}"
    elif weight.bytes != needed:
        problem = f"has {weight.bytes} bytes, its shape and type need {needed}"
    if problem:
        raise EngineCorruptError(
            problem, field=f"{PLAN_FILE}: weights.{weight.name}", remedy=REBUILD
        )


def check_weights_header(path: Path, weights: Sequence[Weight]) -> None:
    """Check that a weights file has exactly the plan's tensors at the plan's offsets.

    Raises:
        EngineCorruptError: tensors or offsets differ, or the header is not readable.
    """
    stored = {
        name: tuple(entry.data_offsets)
        for name, entry in _read_entries(path).items()
        if not name.startswith("pad.")
    }
    for weight in weights:
        found = stored.pop(weight.name, None)
        if found != (weight.offset, weight.offset + weight.bytes):
            raise EngineCorruptError(
                f"has tensor {weight.name} at {found}, and {PLAN_FILE} says "
                f"{(weight.offset, weight.offset + weight.bytes)}",
                field=str(path),
                remedy=REBUILD,
            )
    if stored:
        raise EngineCorruptError(
            f"has tensor {min(stored)}, of which {PLAN_FILE} does not know",
            field=str(path),
            remedy=REBUILD,
        )


def _read_entries(path: Path) -> dict[str, _Entry]:
    try:
        with open_regular(path) as file:
            length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
            if length > _MAX_HEADER_BYTES:
                raise UnreadableError(f"claims a header of {length} bytes")
            raw = decode_json(os.pread(file.fileno(), length, 8), dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        return {name: decode_json(bytes(entry), _Entry) for name, entry in raw.items()}
    except (UnreadableError, OSError) as error:
        raise EngineCorruptError(str(error), field=f"{path}: header", remedy=REBUILD) from error

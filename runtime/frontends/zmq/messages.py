"""Encodes batches of KV events as vLLM's messages: MessagePack, with events as maps or arrays.

Fields are those of vLLM 0.33 (vllm/distributed/kv_events.py). A batch is always an array: the time,
the events, and the data-parallel rank, which is 0.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from trtc.runtime.engine.kv_events import (
    AllCleared,
    Batch,
    BlocksRemoved,
    BlocksStored,
    EventLog,
    KvEvent,
    block_hash,
    kind_of,
)
from trtc.runtime.scheduling.cache_events import is_root

EventFormat = Literal["map", "array"]
"""Encoding of an event: `map` since vLLM 0.28, `array` before."""

_STORED = (
    ("block_hashes", list[int]),
    ("parent_block_hash", int | None),
    ("token_ids", Sequence[int]),
    ("block_size", int),
    ("lora_id", int | None),
    ("medium", str | None),
    ("lora_name", str | None),
    ("extra_keys", list[tuple[str, ...] | None] | None, None),
    ("group_idx", int | None, None),
    ("kv_cache_spec_kind", str | None, None),
    ("kv_cache_spec_sliding_window", int | None, None),
)
_REMOVED = (
    ("block_hashes", list[int]),
    ("medium", str | None),
    ("group_idx", int | None, None),
)
_FIELDS: Mapping[str, Sequence[Any]] = {
    "BlockStored": _STORED,
    "BlockRemoved": _REMOVED,
    "AllBlocksCleared": (),
}
"""Fields of each event, with defaults, in vLLM's order, which is the order in arrays. Maps leave
out fields that have their default."""


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int = 0


def encoder(how: EventFormat) -> Callable[[Batch, EventLog], bytes]:
    """A function that encodes batches of a log."""
    make: dict[str, Any] = {
        name: msgspec.defstruct(
            name, fields, tag=True, array_like=how == "array", omit_defaults=True
        )
        for name, fields in _FIELDS.items()
    }
    pack = msgspec.msgpack.Encoder().encode

    def encode(batch: Batch, log: EventLog) -> bytes:
        events = [make[name](**fields) for name, fields in map(log_fields(log), batch.events)]
        return pack(_Batch(batch.at, events))

    return encode


def log_fields(log: EventLog) -> Callable[[KvEvent], tuple[str, dict[str, Any]]]:
    """A function that converts a log's events to their names and fields."""

    def fields(event: KvEvent) -> tuple[str, dict[str, Any]]:
        if isinstance(event, AllCleared):
            return "AllBlocksCleared", {}
        common = {
            "block_hashes": [block_hash(key) for key in event.keys],
            "medium": event.medium,
            "group_idx": event.group,
        }
        if isinstance(event, BlocksRemoved):
            return "BlockRemoved", common
        return "BlockStored", common | _stored(event, log)

    return fields


def _stored(event: BlocksStored, log: EventLog) -> dict[str, Any]:
    kind, window = kind_of(log.windows[event.group])
    is_first = is_root(event.parent)
    return {
        "parent_block_hash": None if is_first else block_hash(event.parent),
        "token_ids": event.token_ids,
        "block_size": log.page_size,
        "lora_id": None,
        "lora_name": None,
        "extra_keys": _extra_keys(event, log) if is_first else None,
        "kv_cache_spec_kind": kind,
        "kv_cache_spec_sliding_window": window,
    }


def _extra_keys(event: BlocksStored, log: EventLog) -> list[tuple[str, ...] | None] | None:
    """The namespace, with the first block only, where vLLM has a cache salt: the hashes of later
    blocks depend on it. None: the namespace that all clients share."""
    name = log.namespace(event.parent)
    return [(name,), *[None] * (len(event.keys) - 1)] if name else None

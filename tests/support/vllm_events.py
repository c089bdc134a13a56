"""KV events as vLLM declares them, and a router that believes nothing else.

The classes are those of vllm/distributed/kv_events.py of vLLM 0.33, and for arrays those of 0.11,
declared anew from its documentation.
"""

from collections.abc import Sequence
from typing import Any

import msgspec


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class OldEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class OldBlockStored(OldEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class OldBlockRemoved(OldEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class OldAllBlocksCleared(OldEvent, tag="AllBlocksCleared"):
    pass


class OldKVEventBatch(EventBatch):
    events: list[OldBlockStored | OldBlockRemoved | OldAllBlocksCleared]


DECODERS: dict[str, Any] = {
    "map": msgspec.msgpack.Decoder(KVEventBatch),
    "array": msgspec.msgpack.Decoder(OldKVEventBatch),
}


class Router:
    """What a server has cached, by what it told."""

    def __init__(self) -> None:
        self.blocks: set[tuple[int, str]] = set()
        """Hash and medium."""
        self.tokens: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        """Hash -> its parent and tokens."""
        self.namespaces: dict[int, str] = {}
        """Hash of a first block -> the extra key that it has."""
        self.numbers: list[int] = []
        """Of the batches."""

    def take(self, number: int, batch: Any) -> None:
        self.numbers.append(number)
        for event in batch.events:
            name = type(event).__name__.removeprefix("Old")
            if name == "AllBlocksCleared":
                self.blocks.clear()
            elif name == "BlockRemoved":
                for one in event.block_hashes:
                    self.blocks.remove((one, event.medium))
            else:
                self._store(event)

    def prefix(self, name: int) -> tuple[int, ...]:
        """The tokens up to a block's last one."""
        tokens: tuple[int, ...] = ()
        at: int | None = name
        while at is not None:
            at, own = self.tokens[at]
            tokens = own + tokens
        return tokens

    def held(self, medium: str) -> set[tuple[int, ...]]:
        """The prefixes that are cached there."""
        return {self.prefix(name) for name, where in self.blocks if where == medium}

    def _store(self, event: Any) -> None:
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        parent = event.parent_block_hash
        if keys := getattr(event, "extra_keys", None):
            assert parent is None and len(keys) == len(event.block_hashes)
            assert not any(keys[1:])
            (self.namespaces[event.block_hashes[0]],) = keys[0]
        for at, name in enumerate(event.block_hashes):
            self.tokens[name] = parent, _piece(event.token_ids, at, size)
            self.blocks.add((name, event.medium))
            parent = name


def _piece(token_ids: Sequence[int], at: int, size: int) -> tuple[int, ...]:
    return tuple(token_ids[at * size : (at + 1) * size])

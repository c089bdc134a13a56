"""SubscribeKvEvents: streams KV events from a subscriber's last position on."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager, suppress

from trtc.protos.errors import QueueFullError
from trtc.protos.smg import common_pb2 as pb
from trtc.runtime.engine.cache_feed import POOL
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

MAX_SUBSCRIBERS = 16
"""Most concurrent subscribers. Routers are few; each costs a batch every few milliseconds."""
_LARGE_BLOCKS = 64
"""Blocks of a batch from which on its message is made in a thread."""


class Subscribers:
    """Counts subscribers."""

    def __init__(self) -> None:
        self._number = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Count one within the context; raises QueueFullError if there are MAX_SUBSCRIBERS."""
        if self._number >= MAX_SUBSCRIBERS:
            raise QueueFullError(
                f"the server has its limit of {MAX_SUBSCRIBERS} subscribers",
                remedy="Let fewer routers subscribe",
                limit="kv_subscribers",
            )
        self._number += 1
        try:
            yield
        finally:
            self._number -= 1


async def batches_from(log: EventLog, first: int) -> AsyncGenerator[pb.KvEventBatch, None]:
    """The batches of a log from number `first` on, as they are made; 0: from its beginning. If the
    log no longer keeps them, or the number is of another server, a snapshot comes first.

    Raises:
        QueueFullError: the reader has fallen behind the batches that the log keeps.
    """
    arrived = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(arrived.set)

    leave = log.listen(wake)
    try:
        batches = log.after(max(first, 1) - 1)
        seen = first - 1
        if batches is None:
            snapshot = await asyncio.to_thread(log.snapshot)
            for index, batch in enumerate(snapshot):
                yield await _made(batch, log, _chunk(index, snapshot))
            seen = snapshot[-1].number
            batches = []
        while True:
            for batch in batches:
                yield await _made(batch, log)
                seen = batch.number
            if log.is_closed and not log.after(seen):
                return
            await arrived.wait()
            arrived.clear()
            kept = log.after(seen)
            if kept is None:
                raise QueueFullError(
                    "the subscriber has fallen too far behind",
                    remedy="Subscribe again, and read the events as they come",
                    limit="kv_events",
                )
            batches = kept
    finally:
        leave()


async def _made(
    batch: Batch, log: EventLog, chunk: pb.KvSnapshotChunk | None = None
) -> pb.KvEventBatch:
    if batch.num_blocks > _LARGE_BLOCKS:
        return await asyncio.to_thread(message, batch, log, chunk)
    return message(batch, log, chunk)


def message(
    batch: Batch, log: EventLog, chunk: pb.KvSnapshotChunk | None = None
) -> pb.KvEventBatch:
    """SMG's message of a batch; `chunk`: its part of a snapshot, or None."""
    return pb.KvEventBatch(
        sequence_number=batch.number,
        timestamp=batch.at,
        events=[_event(event, log) for event in batch.events],
        dp_rank=0,
        snapshot=chunk,
    )


def _chunk(index: int, snapshot: Sequence[Batch]) -> pb.KvSnapshotChunk:
    blocks = sum(one.num_blocks for one in snapshot)
    return pb.KvSnapshotChunk(index=index, count=len(snapshot), blocks=blocks)


def _event(event: KvEvent, log: EventLog) -> pb.KvCacheEvent:
    if isinstance(event, AllCleared):
        return pb.KvCacheEvent(cleared=pb.KvCacheCleared())
    if isinstance(event, BlocksRemoved):
        return pb.KvCacheEvent(removed=_removed(event))
    return pb.KvCacheEvent(stored=_stored(event, log))


def _removed(event: BlocksRemoved) -> pb.KvBlocksRemoved:
    return pb.KvBlocksRemoved(
        block_hashes=[block_hash(key) for key in event.keys],
        cache_level=_level(event.medium),
        tier=_tier(event.medium),
        medium=event.medium,
        group_idx=event.group,
    )


def _stored(event: BlocksStored, log: EventLog) -> pb.KvBlocksStored:
    size = log.page_size
    kind, window = kind_of(log.windows[event.group])
    namespace = log.namespace(event.parent)
    is_first = is_root(event.parent)
    level = _level(event.medium)
    blocks = [
        pb.KvBlock(
            block_hash=block_hash(key),
            token_ids=event.token_ids[at * size : (at + 1) * size],
            block_size=size,
            cache_level=level,
        )
        for at, key in enumerate(event.keys)
    ]
    if is_first and namespace:
        blocks[0].extra_keys.append(pb.KvBlockExtraKey(text=namespace))
    return pb.KvBlocksStored(
        blocks=blocks,
        parent_block_hash=None if is_first else block_hash(event.parent),
        tier=_tier(event.medium),
        medium=event.medium,
        group_idx=event.group,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
        cache_salt=namespace or None,
    )


def _level(medium: str) -> int:
    return 0 if medium == POOL else 1


def _tier(medium: str) -> pb.KvCacheTier:
    return pb.KV_CACHE_TIER_DEVICE if medium == POOL else pb.KV_CACHE_TIER_HOST

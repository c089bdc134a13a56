"""A router's view of a prefix cache: rebuilt from KV events alone, and compared with the cache."""

from collections.abc import Iterable

from trtc.runtime.engine.cache_feed import HOST, POOL
from trtc.runtime.engine.host_tier import HostTier
from trtc.runtime.engine.kv_events import AllCleared, Batch, BlocksStored, EventLog, block_hash
from trtc.runtime.scheduling.cache_events import is_root
from trtc.runtime.scheduling.prefix_cache import NO_PAGE, Node, PrefixCache

Block = tuple[int, int, str]
"""Hash, group and medium."""


class KvReader:
    """Applies batches in order; by hashes, as others see them."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.seen = 0
        """The number of the last batch."""
        self.blocks: set[Block] = set()
        self.tokens: dict[int, tuple[int | str, tuple[int, ...]]] = {}
        """Hash -> its parent, or its namespace, and its tokens; of all that ever was."""

    def read(self) -> None:
        """Take over the batches that are new, or a snapshot where they are gone."""
        batches = self.log.after(self.seen)
        self.apply(self.log.snapshot() if batches is None else batches)

    def apply(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            assert batch.number > self.seen or AllCleared() in batch.events or not self.seen
            self.seen = batch.number
            for event in batch.events:
                if isinstance(event, AllCleared):
                    self.blocks.clear()
                elif isinstance(event, BlocksStored):
                    self._store(event)
                else:
                    for key in event.keys:
                        self.blocks.remove((block_hash(key), event.group, event.medium))

    def _store(self, event: BlocksStored) -> None:
        size = self.log.page_size
        assert len(event.token_ids) == size * len(event.keys)
        parent: int | str = (
            self.log.namespace(event.parent) if is_root(event.parent) else block_hash(event.parent)
        )
        for at, key in enumerate(event.keys):
            block = block_hash(key), event.group, event.medium
            assert block not in self.blocks, "stored twice"
            self.blocks.add(block)
            known = parent, event.token_ids[at * size : (at + 1) * size]
            assert self.tokens.setdefault(block[0], known) == known
            parent = block[0]

    def check(self, cache: PrefixCache, tier: HostTier | None) -> None:
        """What it believes is what is there, and its hashes stand for the right tokens."""
        held: set[Block] = set()
        for namespace, root in cache._roots.items():
            for node, before in nodes_below(root):
                name = block_hash(node.name)
                held |= {
                    (name, group, POOL) for group, page in enumerate(node.pages) if page != NO_PAGE
                }
                if any(page != NO_PAGE for page in node.pages):
                    prefix, where = self._prefix(name)
                    assert where == self.log.namespace(cache.name(root)), namespace
                    assert prefix == before + node.key
        if tier is not None:
            held |= {(block_hash(key), group, HOST) for key, group in tier._slots}
        assert self.blocks == held

    def _prefix(self, name: int) -> tuple[tuple[int, ...], str]:
        """The tokens up to a block's last one, as far back as they were told, and the namespace."""
        tokens: tuple[int, ...] = ()
        at: int | str = name
        while isinstance(at, int):
            at, own = self.tokens[at]
            tokens = own + tokens
        return tokens, at


def nodes_below(root: Node) -> Iterable[tuple[Node, tuple[int, ...]]]:
    stack: list[tuple[Node, tuple[int, ...]]] = [(root, ())]
    while stack:
        node, before = stack.pop()
        if node is not root:
            yield node, before
        stack += [(child, before + node.key) for child in node.children.values()]

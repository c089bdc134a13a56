"""The scheduler's state and its changes: admit, allocate, copy on write, fork, preempt, finish.

    plan -> apply -> launched, in flight -> commit

`apply` counts a step's tokens as computed and its samples as pending; `commit` takes in what it
drew. Steps are committed in the order in which they were applied, and one more may be applied in
between. A sequence in flight is taken to go on. If it ends meanwhile (by its token, a stop string,
an abort or a deadline) it lets go of its lanes and pages at once, although a step in flight still
reads and writes those pages, and `commit` drops what that step draws for it. This is safe:

- Copies and steps take effect in the order of `apply`. Whoever is given a page later writes it
  later, and reads of it only what it wrote, copied or found in the prefix cache.
- A page enters the prefix cache when the step that filled it is committed. A step in flight writes
  only behind what it was given as computed, in pages that one sequence holds: never a cached page.
  A page that it reads may be evicted meanwhile, or replaced by its equal, and given away: as above.
- A copy on write reads its source after all earlier steps have written it.
- Nobody is preempted while a step is in flight (scheduler.py), and nobody who has ended comes back:
  a sequence in flight either has the pages that its step was given, or wants nothing of it.
- A request forks in `commit`, with no later step of it in flight (`Sequence.awaits_token`).
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from trtc.protos.errors import InvariantError
from trtc.runtime.kv_pool import PageCopy
from trtc.runtime.prefix_cache import Node, PrefixCache
from trtc.runtime.request import FinishReason
from trtc.runtime.sequence import Sequence, Status
from trtc.runtime.step_plan import Admission, StepPlan

_by_rank = attrgetter("rank")


class Drawn(NamedTuple):
    """A token that a step gave to a sequence."""

    sequence: Sequence
    row: int
    """Row of the step's samples."""
    finish_reason: FinishReason | None


@dataclass
class Changes:
    """What the loop's tables must take over."""

    placed: list[Sequence] = field(default_factory=list)
    """Sequences new on their lanes."""
    grown: list[tuple[Sequence, int]] = field(default_factory=list)
    """Sequences whose pages changed, and the index of the first that did."""
    copies: list[PageCopy] = field(default_factory=list)
    """Page copies to perform, in order, before the step."""


@dataclass
class Counters:
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prefilled_tokens: int = 0
    """Recomputed ones included; decodes not."""
    drawn_tokens: int = 0


class SchedulerState:
    """Queue, running sequences, lanes and pages of one engine. One thread uses it."""

    def __init__(self, cache: PrefixCache, *, num_lanes: int) -> None:
        self.cache = cache
        self._page_size = cache.pool.page_size
        self.num_lanes = num_lanes
        self.waiting: list[Sequence] = []
        """In order of rank."""
        self.running: list[Sequence] = []
        """In order of rank."""
        self.free_lanes = list(range(num_lanes - 1, -1, -1))
        self.num_in_flight = 0
        """Steps that were applied and not yet committed."""
        self.counters = Counters()
        self._changes = Changes()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def enqueue(self, sequence: Sequence) -> None:
        """Add a waiting sequence; alone in the pool it must fit to its full length."""
        assert sequence.status is Status.WAITING
        assert self.cache.pool.pages_for(sequence.max_tokens) <= self.cache.pool.num_pages
        assert sequence.num_samples <= self.num_lanes
        insort(self.waiting, sequence, key=_by_rank)

    def take_changes(self) -> Changes:
        """What happened since the last call."""
        changes, self._changes = self._changes, Changes()
        return changes

    def has_own_page(self, sequence: Sequence) -> bool:
        """Whether a running sequence has a page for its next token, and alone holds it."""
        pages = sequence.pages
        index = sequence.num_computed // self._page_size
        return index < len(pages) and self.cache.pool.refs[pages[index]] == 1

    # Pages of an admission, as the plan counts and `apply` takes them.

    def num_new_pages(self, sequence: Sequence, matched: Items[Node]) -> int:
        """Pages to allocate for all known tokens; one more when the last match is copied."""
        known = len(sequence.token_ids)
        pages = self.cache.pool.pages_for(known) - len(matched)
        return pages + self._is_full_hit(sequence, matched)

    def num_computed_after(self, sequence: Sequence, matched: Items[Node]) -> int:
        """Tokens that need no computing. The last one does: its logits are wanted."""
        hit = len(matched) * self.cache.pool.page_size
        return hit - self._is_full_hit(sequence, matched)

    def _is_full_hit(self, sequence: Sequence, matched: Items[Node]) -> bool:
        return len(matched) * self.cache.pool.page_size == len(sequence.token_ids)

    # Before the step.

    def apply(self, plan: StepPlan) -> None:
        """Make the plan's pages ready, and take its tokens for computed: it is launched now."""
        assert not (plan.preempted and self.num_in_flight)
        for sequence in plan.preempted:
            self._preempt(sequence)
        if plan.preempted:
            self.running = [one for one in self.running if one.status is Status.RUNNING]
        for admission in plan.admissions:  # before anything is allocated: that may evict
            admission.sequence.pages = self.cache.claim(admission.matched)
        for admission in plan.admissions:
            self._admit(admission)
        for sequence, start, num_tokens, num_samples in plan.chunks:
            if num_tokens == 1 and not self.has_own_page(sequence):
                self._secure_page(sequence)
            sequence.num_computed = start + num_tokens
            if num_samples:
                sequence.num_pending += 1
        self.num_in_flight += 1

    def _preempt(self, sequence: Sequence) -> None:
        self._let_go(sequence)
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=_by_rank)
        self.counters.preemptions += 1

    def _secure_page(self, sequence: Sequence) -> None:
        """A page of its own for the next token, which it does not have."""
        index = sequence.num_computed // self._page_size
        if index == len(sequence.pages):
            sequence.pages += self.cache.allocate(1)
        else:
            self._copy_on_write(sequence, index)
        self._changes.grown.append((sequence, index))

    def _copy_on_write(self, sequence: Sequence, index: int) -> None:
        """Replace a shared page by a copy. The others keep the source at least until the copy."""
        source = sequence.pages[index]
        (target,) = self.cache.allocate(1)
        sequence.pages[index] = target
        self._changes.copies.append(PageCopy(source, target))
        self.cache.release((source,))

    def _admit(self, admission: Admission) -> None:
        sequence, matched = admission
        at = bisect_left(self.waiting, sequence.rank, key=_by_rank)
        assert self.waiting[at] is sequence
        del self.waiting[at]
        insort(self.running, sequence, key=_by_rank)
        sequence.status = Status.RUNNING
        sequence.lanes = [self.free_lanes.pop() for _ in range(sequence.num_samples)]
        sequence.num_computed = self.num_computed_after(sequence, matched)
        full_hit = self._is_full_hit(sequence, matched)
        sequence.node = matched[-1] if matched else self.cache.root
        sequence.num_cached_pages = len(matched)
        if full_hit:
            # The page to write becomes a copy, and with it the last page of the tree's path.
            self._copy_on_write(sequence, len(matched) - 1)
            sequence.node = matched[-1].parent
            sequence.num_cached_pages -= 1
        missing = self.cache.pool.pages_for(len(sequence.token_ids)) - len(sequence.pages)
        sequence.pages += self.cache.allocate(missing)
        self._changes.placed.append(sequence)
        self._count_hits(sequence)

    def _count_hits(self, sequence: Sequence) -> None:
        if sequence.cached_prompt_tokens is None:
            sequence.cached_prompt_tokens = sequence.num_computed
        self.counters.prefix_query_tokens += len(sequence.token_ids)
        self.counters.prefix_hit_tokens += sequence.num_computed

    # After the step.

    def commit(
        self, plan: StepPlan, token_ids: Items[int], invalid_rows: Collection[int] = ()
    ) -> list[Drawn]:
        """Take over what the oldest step in flight computed and drew.

        Args:
            token_ids: [R] one for each sample of the plan's chunks, in order.
            invalid_rows: samples that mean nothing; the caller must end their sequences.

        Returns:
            One entry a row, in order, without the rows of sequences that have ended since the
            step was planned. Sequences that finished have let go of their pages.
        """
        self.num_in_flight -= 1
        drawn: list[Drawn] = []
        row = 0
        for sequence, start, num_tokens, num_samples in plan.chunks:
            if num_tokens > 1 or start < sequence.num_prompt:
                self.counters.prefilled_tokens += num_tokens
            if sequence.lanes:  # else it has ended since
                num_full = (start + num_tokens) // self._page_size
                valid = num_samples == 0 or row not in invalid_rows
                if num_full > sequence.num_cached_pages and self.cache.enabled and valid:
                    self._cache_pages(sequence, num_full)
                if num_samples:
                    sequence.num_pending -= 1
                    forks = self._fork(sequence) if num_samples > 1 else ()
                    drawn.append(_give(sequence, row, token_ids[row]))
                    for fork in forks:
                        at = row + fork.index
                        drawn.append(_give(fork, at, token_ids[at]))
            row += num_samples
        assert row == len(token_ids), (row, len(token_ids))
        self.counters.drawn_tokens += len(drawn)
        self.finish([one.sequence for one in drawn if one.finish_reason is not None])
        return drawn

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """The n - 1 other sequences of a request, sharing all pages of the prefilled prompt."""
        lanes = sequence.lanes[1:]
        del sequence.lanes[1:]
        sequence.num_samples = 1
        children = [sequence.fork(index, lane) for index, lane in enumerate(lanes, start=1)]
        for child in children:
            self.cache.pool.share(child.pages)
            insort(self.running, child, key=_by_rank)
        self._changes.placed += children
        return children

    def _cache_pages(self, sequence: Sequence, num_full: int) -> None:
        """Cache the first pages, which completed steps have filled."""
        size = self._page_size
        for index in range(sequence.num_cached_pages, num_full):
            assert sequence.node is not None
            page = sequence.pages[index]
            tokens = sequence.token_ids[index * size : (index + 1) * size]
            sequence.node = self.cache.insert(sequence.node, tokens, page)
            if sequence.node.page != page:
                sequence.pages[index] = sequence.node.page
                self._changes.grown.append((sequence, index))
        sequence.num_cached_pages = num_full

    def finish(self, sequences: Iterable[Sequence]) -> None:
        """End sequences, waiting or running; those that have finished already stay so."""
        any_ran = False
        for sequence in sequences:
            if sequence.status is Status.WAITING:
                at = bisect_left(self.waiting, sequence.rank, key=_by_rank)
                assert self.waiting[at] is sequence
                del self.waiting[at]
            elif sequence.status is Status.RUNNING:
                any_ran = True
                self._let_go(sequence)
            sequence.status = Status.FINISHED
        if any_ran:
            self.running = [one for one in self.running if one.status is Status.RUNNING]

    def _let_go(self, sequence: Sequence) -> None:
        """Return lanes and pages; full pages stay in the prefix cache while there is room."""
        self.cache.release(sequence.pages)
        self.free_lanes += sequence.lanes
        sequence.pages = []
        sequence.lanes = []
        sequence.node = None
        sequence.num_cached_pages = 0
        sequence.num_computed = 0
        sequence.num_pending = 0

    def check_integrity(self) -> None:
        """Pages, lanes and lists agree; for idle times and tests.

        Raises:
            InvariantError: something leaked.
        """
        self.cache.check_integrity([sequence.pages for sequence in self.running])
        lanes = sorted([*self.free_lanes, *(lane for one in self.running for lane in one.lanes)])
        if lanes != list(range(self.num_lanes)):
            raise InvariantError("a lane leaked or was given away twice")
        for name, status, listed in (
            ("waiting", Status.WAITING, self.waiting),
            ("running", Status.RUNNING, self.running),
        ):
            ranks = [sequence.rank for sequence in listed]
            if ranks != sorted(set(ranks)):
                raise InvariantError(f"the {name} sequences are not in order")
            if any(sequence.status is not status for sequence in listed):
                raise InvariantError(f"a sequence that is not {name} is listed so")
        for sequence in self.running:
            if self.cache.pool.pages_for(sequence.num_computed) > len(sequence.pages):
                raise InvariantError("a sequence has computed tokens without pages")
            if not 0 <= sequence.num_pending <= self.num_in_flight:
                raise InvariantError("a sequence has pending tokens that no step in flight draws")
        if any(one.pages or one.lanes or one.num_pending for one in self.waiting):
            raise InvariantError("a waiting sequence holds pages or lanes, or is in flight")


def _give(sequence: Sequence, row: int, token_id: int) -> Drawn:
    sequence.token_ids.append(token_id)
    return Drawn(sequence, row, sequence.finish_reason())

"""The scheduler's state and its changes: admit, allocate, copy on write, fork, preempt, finish.

    plan -> apply -> launched, in flight -> commit

`apply` counts a step's tokens as computed and its samples as pending; `commit` takes in the drawn
tokens. Steps are committed in the order in which they were applied, and one more may be applied in
between. A sequence in flight is assumed to continue. If its sample is known not to count (`hold`),
it is rolled back before the next step is planned. If the sequence ends meanwhile (by its token, a
stop string, an abort or a deadline) it releases its lanes and pages at once, although a step in
flight still reads and writes those pages, and `commit` drops its tokens of that step. This is safe:

- Copies and steps take effect in the order of `apply`. The next holder of a page writes it later,
  and reads only what it wrote, copied or found in the prefix cache.
- A page enters the prefix cache when the step that filled it is committed. A step in flight writes
  only behind the computed tokens, in pages that one sequence holds: never in a cached page. A page
  that it reads may be evicted meanwhile, or replaced by an equal one, and reallocated: as above.
- A copy on write reads its source after all earlier steps have written it.
- Nothing is preempted while a step is in flight (scheduler.py), and an ended sequence does not come
  back: a sequence in flight either has the pages that its step was given, or has ended.
- A request forks in `commit`, with no later step of it in flight (`sits_out`).

A state is overwritten as its sequence advances, and cannot be restored. So each row that verifies
drafts writes its state to a page of its own. `commit` puts the states of accepted tokens into the
page table, and releases the others. Nothing reads them before that: no later step of the sequence
is in flight. The last row of a sequence with a mask does the same, because its token is discarded
if the mask is late; whether it was late is known before the next step is applied.
"""

from bisect import insort
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Items
from math import inf
from operator import attrgetter
from typing import NamedTuple

import msgspec

from trtc.protos.errors import InvariantError
from trtc.runtime.requests.principal import Namespace
from trtc.runtime.requests.request import FinishReason
from trtc.runtime.scheduling.fair_queue import FairQueue
from trtc.runtime.scheduling.kv_pool import PageCopy
from trtc.runtime.scheduling.prefix_cache import Node, PrefixCache
from trtc.runtime.scheduling.sequence import Sequence, Status, rank_of
from trtc.runtime.scheduling.step_plan import Admission, StepPlan

AGEING_S = 3.0
"""Seconds of waiting that weigh as much as one step of priority, within a client."""
OVERDUE_S = 60.0
"""Seconds without an admission after which a client comes first, whatever the priorities: those of
one client, from -10 to 10, are overcome in as long."""

SNAPSHOT_PAGES = 4
"""Pages of a sequence from one snapshot of its state that is cached like any other page to the
next. Snapshots in between are spare: keeping all would halve the cache for other sequences."""

_by_rank = attrgetter("rank")


class Drawn(NamedTuple):
    """A token that a step drew for a sequence."""

    sequence: Sequence
    row: int
    """Row of the step's samples."""
    token_id: int
    finish_reason: FinishReason | None


class Changes(msgspec.Struct):
    """Changes that the loop's tables must follow."""

    placed: list[Sequence] = msgspec.field(default_factory=list)
    """Sequences that were placed on their lanes."""
    grown: list[tuple[Sequence, int, int]] = msgspec.field(default_factory=list)
    """(sequence, begin, end): pages [begin, end) of some group changed."""
    copies: list[PageCopy] = msgspec.field(default_factory=list)
    """Page copies to perform, in order, before the step."""


class Counters(msgspec.Struct):
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prefilled_tokens: int = 0
    """Prompt tokens and recomputed ones; decodes are not counted."""
    drawn_tokens: int = 0
    drafted_tokens: int = 0
    """Drafts that steps verified."""
    accepted_tokens: int = 0
    """Drafts that were accepted."""


class SchedulerState:
    """Queue, running sequences, lanes and pages of one engine. Not thread-safe."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        num_lanes: int,
        rope_switch: int | None = None,
        max_draft_rows: int = 0,
        ageing_s: float = AGEING_S,
        overdue_s: float = OVERDUE_S,
    ) -> None:
        """For `ageing_s` see `rank_of`, for `overdue_s` FairQueue, for `rope_switch` Limits, for
        `max_draft_rows` DraftRows."""
        self.cache = cache
        self._rope_switch = rope_switch
        self.max_draft_rows = max_draft_rows
        self.has_drafts = False
        """Whether a running sequence may have drafts."""
        self._page_size = cache.pool.page_size
        self._windows = cache.pool.windows
        self._has_windows = any(window is not None for window in cache.pool.windows)
        self._state_group = cache.pool.state_group
        self.num_lanes = num_lanes
        self.waiting = FairQueue(overdue_s)
        self._ageing_s = ageing_s
        self._num_admitted = 0
        """Sequences admitted for the first time."""
        self.running: list[Sequence] = []
        """In order of rank."""
        self.free_lanes = list(range(num_lanes - 1, -1, -1))
        self.num_in_flight = 0
        """Steps that were applied and not yet committed."""
        self._kept: tuple[Sequence, ...] = ()
        """`StepPlan.kept` of the step that was applied last."""
        self.last_fair_preemption = -inf
        """Time of the last preemption for a client that had none running; see `tick`."""
        self.counters = Counters()
        self._changes = Changes()

    @property
    def has_states(self) -> bool:
        return self._state_group is not None

    def can_hold(self, sequence: Sequence) -> bool:
        """Whether the last token of a running sequence that is in flight can be recomputed: it has
        not overwritten the state that it was computed from. The first token of a page overwrites
        none."""
        begins_page = (sequence.num_computed - 1) % self._page_size == 0
        return not self.has_states or begins_page or bool(sequence.state_pages)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def enqueue(self, sequence: Sequence) -> None:
        """Add a waiting sequence, which at its full length must fit the pool alone."""
        assert sequence.status is Status.WAITING
        assert self.cache.pool.most_pages(sequence.max_tokens) <= self.cache.pool.num_pages
        assert sequence.num_samples <= self.num_lanes
        self.waiting.add(sequence)

    def tick(self, now: float) -> None:
        """Set the time, in seconds; it never goes back."""
        self.waiting.tick(now)

    def take_changes(self) -> Changes:
        """The changes since the last call."""
        changes, self._changes = self._changes, Changes()
        return changes

    def has_own_page(self, sequence: Sequence) -> bool:
        """Whether a running sequence has pages for its next token, and is their only holder."""
        index = sequence.num_computed // self._page_size
        refs = self.cache.pool.refs
        for pages in sequence.pages:  # noqa: SIM110 - asked of every decode
            if index >= len(pages) or refs[pages[index]] != 1:
                return False
        return True

    def sits_out(self, sequence: Sequence) -> bool:
        """Whether the host must know a sequence's pending token before it plans the next one.

        Usually not, because the executor has the token. It must where a request forks, since each
        of its sequences draws its own token; after drafts, since it is not known which count; and
        where a longer context may need other rotary factors.
        """
        return sequence.num_pending > 0 and (
            sequence.num_samples > 1
            or sequence.num_drafted > 0
            or (self._rope_switch is not None and self.outgrows_factors(sequence))
        )

    def outgrows_factors(self, sequence: Sequence) -> bool:
        """Whether a running sequence's next token makes it too long for the rotary factors that its
        cached keys were rotated by."""
        return (
            self._rope_switch is not None
            and sequence.position_offset == 0
            and sequence.num_computed >= self._rope_switch
        )

    def most_context(self, sequence: Sequence) -> int:
        """Tokens that a running sequence can compute by the rotary factors that it has."""
        switch = self._rope_switch
        return sequence.max_tokens if switch is None or sequence.position_offset else switch

    def namespace(self, sequence: Sequence) -> Namespace:
        """The namespace in the prefix cache of a sequence that is admitted now. Keys rotated by
        other rotary factors are in another namespace."""
        if self._position_offset(len(sequence.token_ids)):
            return ("long factors", *sequence.namespace)
        return sequence.namespace

    # Pages of an admission, as the plan counts and `apply` takes them.

    def num_new_pages(self, sequence: Sequence, matched: Items[Node], end: int) -> int:
        """Pages to allocate for all known tokens, in window groups for those up to `end`; one more
        of each group if the last matched page is copied."""
        pool, copied = self.cache.pool, self._is_full_hit(sequence, matched)
        known = len(sequence.token_ids)
        return sum(
            max(0, pool.pages_for(known if window is None else end) - len(matched)) + copied
            for window in self._windows
        )

    def num_missing_pages(self, sequence: Sequence, end: int) -> int:
        """Pages that a running sequence lacks to compute its known tokens before `end`. Window
        groups get their pages chunk by chunk."""
        needed = self.cache.pool.pages_for(end)
        return sum(max(0, needed - len(pages)) for pages in sequence.pages)

    def num_draft_pages(self, sequence: Sequence, end: int, num_drafts: int) -> int:
        """Pages to allocate for drafts behind a running sequence's next token, which ends at `end`:
        those that the drafts reach into, and one for the state of each row."""
        missing = self.num_missing_pages(sequence, end + num_drafts)
        states = 0 if self._state_group is None else 1 + num_drafts
        return missing - self.num_missing_pages(sequence, end) + states

    def num_computed_after(self, sequence: Sequence, matched: Items[Node]) -> int:
        """Tokens that the matched pages provide. The last token is always computed, for its
        logits."""
        hit = len(matched) * self.cache.pool.page_size
        return hit - self._is_full_hit(sequence, matched)

    def _is_full_hit(self, sequence: Sequence, matched: Items[Node]) -> bool:
        return len(matched) * self.cache.pool.page_size == len(sequence.token_ids)

    # Before the step.

    def apply(self, plan: StepPlan) -> None:
        """Allocate the plan's pages and count its tokens as computed. The caller launches it."""
        assert not (plan.preempted and self.num_in_flight)
        self._take_kept_states()
        for sequence in plan.preempted:
            self._preempt(sequence)
        if plan.preempted:
            self.running = [one for one in self.running if one.status is Status.RUNNING]
        if plan.preempts_for_fairness:
            self.last_fair_preemption = self.waiting.now
        for admission in plan.admissions:  # before anything is allocated: that may evict
            admission.sequence.pages = self.cache.claim(admission.matched)
            admission.sequence.num_released = self.cache.first_wanted(admission.matched)
        for admission in plan.admissions:
            self._admit(admission)
        for sequence in plan.secured:
            self._secure_page(sequence)
        for sequence, start, num_tokens, num_samples, _, num_drafts in plan.chunks:
            if num_drafts or self._has_windows:
                self._extend(sequence, self.cache.pool.pages_for(start + num_tokens))
            if num_drafts:
                self._draft(sequence, num_drafts)
            sequence.num_computed = start + num_tokens
            if num_samples:
                sequence.num_pending += 1
                sequence.scores_prompt = False
        for sequence in plan.kept:
            sequence.state_pages = self.cache.allocate(1)
        self._kept = plan.kept
        self.num_in_flight += 1

    def _draft(self, sequence: Sequence, num_drafts: int) -> None:
        if self._state_group is not None:
            sequence.state_pages = self.cache.allocate(1 + num_drafts)
        sequence.num_drafted = num_drafts
        sequence.num_pending += num_drafts
        sequence.drafted_at = sequence.num_output
        self.counters.drafted_tokens += num_drafts

    def _position_offset(self, length: int) -> int:
        switch = self._rope_switch
        return switch if switch is not None and length > switch else 0

    def _preempt(self, sequence: Sequence) -> None:
        self._release_all(sequence)
        # It may be admitted again, with fewer pages, before the loop takes these changes.
        self._changes.grown = [one for one in self._changes.grown if one[0] is not sequence]
        sequence.status = Status.WAITING
        self.waiting.add(sequence)
        self.counters.preemptions += 1

    def _secure_page(self, sequence: Sequence) -> None:
        """Give a sequence pages of its own for its next token; it must lack them."""
        index = sequence.num_computed // self._page_size
        refs = self.cache.pool.refs
        for pages in sequence.pages:
            if index == len(pages):
                pages += self.cache.allocate(1)
            elif refs[pages[index]] > 1:
                self._copy_on_write(pages, index)
        self._changes.grown.append((sequence, index, index + 1))

    def _extend(self, sequence: Sequence, num_pages: int) -> None:
        """Allocate pages so that each group has `num_pages`."""
        begin = num_pages
        for pages in sequence.pages:
            if len(pages) < num_pages:
                begin = min(begin, len(pages))
                pages += self.cache.allocate(num_pages - len(pages))
        if begin < num_pages:
            self._changes.grown.append((sequence, begin, num_pages))

    def _copy_on_write(self, pages: list[int], index: int) -> None:
        """Replace a shared page by a copy. Other holders keep the source until it is copied."""
        source = pages[index]
        (target,) = self.cache.allocate(1)
        pages[index] = target
        self._changes.copies.append(PageCopy(source, target))
        self.cache.release((source,))

    def _admit(self, admission: Admission) -> None:
        sequence, matched = admission
        self.waiting.admit(sequence)
        if sequence.cached_prompt_tokens is None:  # else it comes back after a preemption
            self._num_admitted += 1
            sequence.rank = rank_of(
                sequence.request.priority, self.waiting.now, self._num_admitted, self._ageing_s
            )
        insort(self.running, sequence, key=_by_rank)
        sequence.status = Status.RUNNING
        sequence.lanes = [self.free_lanes.pop() for _ in range(sequence.num_samples)]
        sequence.num_computed = self.num_computed_after(sequence, matched)
        sequence.position_offset = self._position_offset(len(sequence.token_ids))
        full_hit = self._is_full_hit(sequence, matched)
        sequence.node = matched[-1] if matched else self.cache.root(self.namespace(sequence))
        sequence.num_cached_pages = len(matched)
        if full_hit:
            # The page to write becomes a copy, and with it the last page of the tree's path.
            for pages in sequence.pages:
                self._copy_on_write(pages, len(matched) - 1)
            sequence.node = matched[-1].parent
            sequence.num_cached_pages -= 1
        known = self.cache.pool.pages_for(len(sequence.token_ids))
        for pages, window in zip(sequence.pages, self._windows, strict=True):
            if window is None:
                pages += self.cache.allocate(known - len(pages))
        self._changes.placed.append(sequence)
        self._count_hits(sequence)

    def _count_hits(self, sequence: Sequence) -> None:
        if sequence.cached_prompt_tokens is None:
            sequence.cached_prompt_tokens = sequence.num_computed
        self.counters.prefix_query_tokens += len(sequence.token_ids)
        self.counters.prefix_hit_tokens += sequence.num_computed

    def hold(self, sequence: Sequence) -> None:
        """Discard a running sequence's tokens in flight, because its mask is late or failed.

        The sequence skips steps until it is released, and then computes its last known token again,
        if it can (`can_hold`); else it must end.
        """
        self.cache.release(sequence.state_pages)
        sequence.state_pages = ()
        sequence.num_pending -= 1 + sequence.num_drafted
        sequence.num_computed -= 1 + sequence.num_drafted
        sequence.num_drafted = 0
        sequence.is_held = True

    # After the step.

    def commit(
        self,
        plan: StepPlan,
        token_ids: Items[int],
        invalid_rows: Collection[int] = (),
        held: Collection[Sequence] = (),
        counts: Items[bool] | None = None,
    ) -> list[Drawn]:
        """Take over what the oldest step in flight computed and drew.

        Args:
            token_ids: [R] one for each logit row of the plan's chunks, in order.
            invalid_rows: rows without a valid token; the caller must end their sequences.
            held: sequences whose tokens of this step `hold` has discarded.
            counts: [R] as in SampledTokens.

        Returns:
            One entry for each sample that counts, in order, without the rows of sequences that have
            ended since the step was planned. Finished sequences have released their pages.
        """
        self._land()
        drawn: list[Drawn] = []
        row = 0
        for sequence, start, num_tokens, num_samples, num_scored, num_drafts in plan.chunks:
            if num_drafts:
                end = row + num_drafts + 1
                if sequence.lanes and sequence not in held:  # else it has ended since
                    number = num_drafts + 1 if counts is None else sum(counts[row:end])
                    rows = range(row, row + number)
                    drawn += self._take_drafted(sequence, start, rows, token_ids, invalid_rows)
                row = end
                continue
            if num_tokens > 1 or start < sequence.num_prompt:
                self.counters.prefilled_tokens += num_tokens
            first = row + num_scored
            end = first + num_samples
            if sequence.lanes:  # else it has ended since
                is_held = bool(held) and sequence in held
                num_valid = start + num_tokens - is_held
                num_full = num_valid // self._page_size
                if num_full > sequence.num_cached_pages and self.cache.enabled:
                    valid = not any(row <= bad < end for bad in invalid_rows)
                    if valid:
                        self._cache_pages(sequence, num_full)
                if self._has_windows:
                    self._slide(sequence, num_valid)
                if num_samples and not is_held:
                    sequence.num_pending -= 1
                    forks = self._fork(sequence) if num_samples > 1 else ()
                    drawn.append(_give(sequence, first, token_ids[first]))
                    for fork in forks:
                        at = first + fork.index
                        drawn.append(_give(fork, at, token_ids[at]))
            row = end
        assert row == len(token_ids), (row, len(token_ids))
        self.counters.drawn_tokens += len(drawn)
        self.finish([one.sequence for one in drawn if one.finish_reason is not None])
        if self._rope_switch is not None:
            self._recompute_outgrown([one.sequence for one in drawn])
        return drawn

    def _take_drafted(
        self,
        sequence: Sequence,
        start: int,
        rows: Items[int],
        token_ids: Items[int],
        invalid_rows: Collection[int],
    ) -> list[Drawn]:
        """Take over the tokens that count of a sequence with drafts, up to one that ends it, and
        roll back the rest: the sequence keeps the pages, and later tokens overwrite them."""
        taken: list[Drawn] = []
        for row in rows:
            taken.append(_give(sequence, row, token_ids[row]))
            if taken[-1].finish_reason is not None:
                break
        sequence.num_pending -= 1 + sequence.num_drafted
        sequence.num_drafted = 0
        sequence.num_computed = start + len(taken)
        if self._state_group is not None:
            self._take_states(sequence, start, self._state_group)
        num_right = max(0, len(taken) - 1)
        sequence.num_missed_drafts = 0 if num_right else sequence.num_missed_drafts + 1
        self.counters.accepted_tokens += num_right
        num_full = sequence.num_computed // self._page_size
        is_valid = not any(row in invalid_rows for row in rows)
        if num_full > sequence.num_cached_pages and self.cache.enabled and is_valid:
            self._cache_pages(sequence, num_full)
        if self._has_windows:
            self._slide(sequence, sequence.num_computed)
        return taken

    def _land(self) -> None:
        """The oldest step in flight is complete."""
        self.num_in_flight -= 1
        if not self.num_in_flight:  # else `apply` has done so
            self._take_kept_states()

    def _take_kept_states(self) -> None:
        """Take over the states of `StepPlan.kept`, except those of held sequences."""
        for sequence in self._kept:
            if sequence.state_pages:
                assert self._state_group is not None
                self._take_states(sequence, sequence.num_computed - 1, self._state_group)
        self._kept = ()

    def _take_states(self, sequence: Sequence, start: int, group: int) -> None:
        """Replace a sequence's states by those that a step's rows wrote after tokens that count, in
        each page that of its last token. The rest are released."""
        left, sequence.state_pages = sequence.state_pages, ()
        table, end = sequence.pages[group], start
        released = []
        for page in left:
            if end == sequence.num_computed:
                released.append(page)
                continue
            index = end // self._page_size
            released.append(table[index])
            table[index] = page
            end += 1
        self.cache.release(released)
        if end > start:
            begin = start // self._page_size
            self._changes.grown.append((sequence, begin, self.cache.pool.pages_for(end)))

    def _recompute_outgrown(self, sequences: Iterable[Sequence]) -> None:
        """Requeue sequences that now need the other rotary factors. None is in flight: a sequence
        that outgrows its factors is not planned ahead (scheduler.py)."""
        for sequence in sequences:
            offset = self._position_offset(len(sequence.token_ids))
            if sequence.status is Status.RUNNING and offset != sequence.position_offset:
                self._preempt(sequence)
        self.running = [one for one in self.running if one.status is Status.RUNNING]

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """The n - 1 other sequences of a request, sharing all pages of the prefilled prompt."""
        lanes = sequence.lanes[1:]
        del sequence.lanes[1:]
        sequence.num_samples = 1
        children = [sequence.fork(index, lane) for index, lane in enumerate(lanes, start=1)]
        for child in children:
            for pages in child.held_pages():
                self.cache.pool.share(pages)
            insort(self.running, child, key=_by_rank)
        self._changes.placed += children
        return children

    def _cache_pages(self, sequence: Sequence, num_full: int) -> None:
        """Cache the first `num_full` pages, which completed steps have filled."""
        size = self._page_size
        for index in range(sequence.num_cached_pages, num_full):
            assert sequence.node is not None
            pages = [table[index] for table in sequence.pages]
            tokens = sequence.token_ids[index * size : (index + 1) * size]
            sequence.node = self.cache.insert(sequence.node, tokens, pages)
            if sequence.node.pages != pages:
                for table, page in zip(sequence.pages, sequence.node.pages, strict=True):
                    table[index] = page
                self._changes.grown.append((sequence, index, index + 1))
        sequence.num_cached_pages = num_full

    def _slide(self, sequence: Sequence, num_computed: int) -> None:
        """Release pages that no later token's window reaches. They stay cached while there is
        room."""
        for group, window in enumerate(self._windows):
            first = sequence.num_released[group]
            end = self.cache.pool.num_outside(window, num_computed)
            if end > first:
                pages = sequence.pages[group]
                if window == 0:
                    for index in range(first, end):
                        spare = (index + 1) % SNAPSHOT_PAGES != 0
                        self.cache.release(pages[index : index + 1], spare=spare)
                else:
                    self.cache.release(pages[first:end])
                sequence.num_released[group] = end

    def finish(self, sequences: Iterable[Sequence]) -> None:
        """End sequences, waiting or running; those that have finished already stay so."""
        any_ran = False
        for sequence in sequences:
            if sequence.status is Status.WAITING:
                self.waiting.remove(sequence)
            elif sequence.status is Status.RUNNING:
                any_ran = True
                self._release_all(sequence)
            sequence.status = Status.FINISHED
        if any_ran:
            self.running = [one for one in self.running if one.status is Status.RUNNING]

    def _release_all(self, sequence: Sequence) -> None:
        """Return lanes and pages; full pages stay in the prefix cache while there is room."""
        for pages in sequence.held_pages():
            self.cache.release(pages)
        self.free_lanes += sequence.lanes
        self.waiting.release(sequence.request.principal, len(sequence.lanes))
        sequence.pages = []
        sequence.num_released = []
        sequence.lanes = []
        sequence.node = None
        sequence.num_cached_pages = 0
        sequence.num_computed = 0
        sequence.num_pending = 0
        sequence.num_drafted = 0
        sequence.state_pages = ()
        sequence.drafts = ()
        sequence.is_held = False

    def check_integrity(self) -> None:
        """Check that pages, lanes and lists agree; for idle times and tests.

        Raises:
            InvariantError: something leaked.
        """
        for _ in self.integrity_checks():
            pass

    def integrity_checks(self) -> Iterator[None]:
        """The same check in short parts, because hundreds of thousands of pages take a while. Start
        again after any change."""
        held = [held for one in self.running for held in one.held_pages()]
        yield from self.cache.integrity_checks(held)
        lanes = sorted([*self.free_lanes, *(lane for one in self.running for lane in one.lanes)])
        if lanes != list(range(self.num_lanes)):
            raise InvariantError("a lane leaked or was allocated twice")
        self.waiting.check_integrity(self.num_lanes - len(self.free_lanes))
        ranks = [sequence.rank for sequence in self.running]
        if ranks != sorted(set(ranks)):
            raise InvariantError("the running sequences are not in order")
        for status, listed in ((Status.WAITING, self.waiting), (Status.RUNNING, self.running)):
            if any(sequence.status is not status for sequence in listed):
                raise InvariantError(f"a sequence that is not {status.value} is listed so")
        for sequence in self.running:
            needed = self.cache.pool.pages_for(sequence.num_computed)
            if any(len(pages) < needed for pages in sequence.pages):
                raise InvariantError("a sequence has computed tokens without pages")
            if not 0 <= sequence.num_pending - sequence.num_drafted <= self.num_in_flight:
                raise InvariantError("a sequence has pending tokens that no step in flight draws")
            rows = 1 + sequence.num_drafted if sequence.num_drafted or sequence in self._kept else 0
            if sequence.state_pages and len(sequence.state_pages) != rows:
                raise InvariantError("a sequence has states that no step in flight leaves")
        if any(one.pages or one.lanes or one.num_pending for one in self.waiting):
            raise InvariantError("a waiting sequence holds pages or lanes, or is in flight")


def _give(sequence: Sequence, row: int, token_id: int) -> Drawn:
    sequence.token_ids.append(token_id)
    return Drawn(sequence, row, token_id, sequence.finish_reason())

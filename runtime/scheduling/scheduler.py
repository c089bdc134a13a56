"""Decides what the next step computes. A pure decision: `scheduler_state.apply` carries it out.

Within the step's token budget, the plan takes running sequences in order of rank, and waiting ones
in fair order (fair_queue.py):

1. each running sequence with one token left computes it (decode). If that needs a page and none is
   available, running sequences of lower rank are preempted, starting with the one that has the
   least to recompute. If there is none, the sequence skips this step and keeps its pages;
2. running sequences with more tokens left compute a chunk of them (prefill). Chunks are bounded if
   other sequences decode, or if each of their tokens needs a logit row;
3. waiting sequences are admitted while there are lanes and pages, unless a sequence was preempted.

Preemption for fairness comes before that. If the next client in fair order has nothing running, has
waited for SHARE_S, and does not fit because others hold most lanes, then the client with most lanes
loses the sequence with the least to recompute, at most one in SHARE_S. So no client keeps all lanes
for as long as its sequences run.

The first in rank can take the pages of all others, fits the pool alone and is never preempted, so
it always advances; ranks are assigned at the first admission and never change. Hence no livelock.
Nothing overtakes the first of the queue within a step, and each waiting sequence becomes the first
in bounded time. Hence no starvation.

While a step is in flight the next one is planned ahead: running sequences continue with tokens that
the host does not know yet. A sequence that needs its own pending token on the host skips the step
alone (`SchedulerState.sits_out`); so does one whose mask is late, until the mask is ready. In two
cases nothing at all is planned until the host knows the tokens:

- at least as many sequences skip because of their drafts as decodes go on. Otherwise the two sets
  would be computed in alternate steps from then on;
- a sequence would have to be preempted. The step in flight may end one and free its pages.
"""

from collections.abc import Collection
from typing import NamedTuple

from trtc.runtime.scheduling.prefix_cache import Node
from trtc.runtime.scheduling.scheduler_state import SchedulerState
from trtc.runtime.scheduling.sequence import Sequence
from trtc.runtime.scheduling.step_plan import Admission, Chunk, StepPlan

SHARE_S = 1.0
"""Seconds that a client with nothing running waits before another's sequence is preempted for it,
and between two such preemptions: at most one sequence is recomputed in that time."""


class StepLimits(NamedTuple):
    max_num_tokens: int
    """Tokens in one step."""
    max_tokens_beside_decodes: int | None = None
    """Tokens in a step that computes prompts beside decodes, which all wait for it; None: as many
    as fit. Prompts get at least a quarter of them, however many sequences decode."""


def plan(
    state: SchedulerState, limits: StepLimits, *, stop_before: Sequence | None = None
) -> StepPlan:
    """The next step. Does not change the state.

    It is empty only if nothing is left to compute, or if the step in flight must complete first.

    Args:
        stop_before: a waiting sequence whose pages are being restored (restoring.py); neither it
            nor those behind it are admitted. None: there is none.
    """
    chosen = _plan(state, limits, stop_before, may_preempt_for_fairness=True)
    if chosen.preempts_for_fairness and not chosen.chunks:
        return _plan(state, limits, stop_before, may_preempt_for_fairness=False)
    return chosen


def _plan(
    state: SchedulerState,
    limits: StepLimits,
    stop_before: Sequence | None,
    *,
    may_preempt_for_fairness: bool,
) -> StepPlan:
    draft = _Draft(state, limits)
    preempts_for_fairness = may_preempt_for_fairness and draft.preempt_for_fairness()
    draft.decode_running()
    if draft.must_wait:
        return StepPlan()
    if state.has_drafts:
        draft.add_drafts()
    if draft.chunks and limits.max_tokens_beside_decodes is not None:
        draft.bound_prefill(limits.max_tokens_beside_decodes)
    draft.prefill_running()
    if not draft.preempted:
        draft.admit_waiting(stop_before)
    return StepPlan(
        tuple(draft.preempted),
        tuple(draft.secured),
        tuple(draft.admissions),
        tuple(draft.chunks),
        scores=draft.scores,
        preempts_for_fairness=preempts_for_fairness,
        has_drafts=draft.has_drafts,
        kept=draft.keep_states(),
    )


class _Draft:
    """A plan under construction, and the state of the pages after it."""

    def __init__(self, state: SchedulerState, limits: StepLimits) -> None:
        self._state = state
        self._cache = state.cache
        self._page_size = state.cache.pool.page_size
        self._budget = limits.max_num_tokens
        self._available = state.cache.num_available
        self._dropped: dict[int, int] = {}
        """page -> references that this plan drops, by preemption or copy-on-write."""
        self._claimed: set[int] = set()
        """Idle pages that admissions of this plan hold."""
        self._is_ahead = state.num_in_flight > 0
        self._spare_rows = len(state.free_lanes)
        """Logit rows, of as many as there are lanes, that no running sequence may need."""
        self._rows_beyond_lanes = max(0, state.max_draft_rows - state.num_lanes)
        """Further logit rows, for drafts."""
        self.scores = False
        """Whether a chunk has scored tokens."""
        self.has_drafts = False
        """Whether a chunk has drafts."""
        self.must_wait = False
        """Whether the step in flight must be complete before this one can be planned."""
        self._num_awaiting_drafts = 0
        """Running sequences that skip the step because of drafts."""
        self._prefills: list[tuple[Sequence, int]] = []
        """Running sequences with more than one token left, and the number of those tokens."""
        self.preempted: dict[Sequence, None] = {}
        self.secured: list[Sequence] = []
        """Decodes that need pages of their own for their token, and get them."""
        self.admissions: list[Admission] = []
        self.chunks: list[Chunk] = []

    def preempt_for_fairness(self) -> bool:
        """Preempt one sequence for a client that has none running, if need be; returns whether."""
        state = self._state
        if state.waiting.now - state.last_fair_preemption < SHARE_S:
            return False
        first = state.waiting.deprived(SHARE_S)
        if first is None or self._has_place(first):
            return False
        victims = [
            one
            for one in state.running[1:]
            if state.waiting.must_share(one.request.principal, first)
        ]
        if not victims:
            return False
        self.must_wait = self._is_ahead
        if not self.must_wait:
            self._preempt(min(victims, key=lambda one: one.num_computed))
        return not self.must_wait

    def _has_place(self, sequence: Sequence) -> bool:
        """Whether there are lanes and pages for a part of a waiting sequence."""
        if len(self._state.free_lanes) < sequence.num_samples:
            return False
        matched = self._match(sequence)
        start = self._state.num_computed_after(sequence, matched)
        end = min(len(sequence.token_ids), start + self._page_size - start % self._page_size)
        _, missing = self._pages_to_take(sequence, matched, end)
        return missing <= 0

    def decode_running(self) -> None:
        for sequence in self._state.running:
            if self._budget == 0 or self.must_wait:
                return
            remaining = sequence.num_remaining
            if sequence.is_held:
                continue
            if remaining > 1:
                self._prefills.append((sequence, remaining))
            elif remaining == 1 and sequence not in self.preempted:
                self._decode(sequence)
        if self._num_awaiting_drafts and self._num_awaiting_drafts >= len(self.chunks):
            self.must_wait = True

    def _decode(self, sequence: Sequence) -> None:
        if sequence.num_pending and self._state.sits_out(sequence):
            self._num_awaiting_drafts += sequence.num_drafted > 0
            return
        if not self._state.has_own_page(sequence):
            if not self._secure_page(sequence):
                return
            self.secured.append(sequence)
        self._budget -= 1
        self.chunks.append(Chunk(sequence, sequence.num_computed, 1, sequence.num_samples))

    def add_drafts(self) -> None:
        """Extend decodes by their drafts, as far as tokens, rows and available pages allow. Spare
        rows are left for waiting sequences, if there are any."""
        rows = self._rows_beyond_lanes + (0 if self._state.waiting else self._spare_rows)
        prompts = self._pages_of_prompts()
        for at, chunk in enumerate(self.chunks):
            number = self._fitting_drafts(chunk, min(self._budget, rows), prompts)
            if number:
                self.chunks[at] = chunk._replace(num_tokens=1 + number, num_drafts=number)
                self._budget -= number
                rows -= number
                self.has_drafts = True
        if not self._state.waiting:
            self._spare_rows = min(self._spare_rows, rows)

    def _fitting_drafts(self, chunk: Chunk, most: int, kept_back: int) -> int:
        """How many drafts of a decode, at most `most`, find pages; takes the pages. `kept_back` of
        the available pages are not used."""
        sequence, end, state = chunk.sequence, chunk.start + 1, self._state
        number = min(len(sequence.drafts), most, state.most_context(sequence) - end)
        while number > 0:
            more = state.num_draft_pages(sequence, end, number)
            if more <= self._available - kept_back:
                self._available -= more
                return number
            number -= 1
        return 0

    def _pages_of_prompts(self) -> int:
        """Pages that chunks of running sequences' prompts may need in this step."""
        return sum(
            self._state.num_missing_pages(one, one.num_computed + min(remaining, self._budget))
            for one, remaining in self._prefills
        )

    def bound_prefill(self, max_tokens: int) -> None:
        """Limit prompts to the tokens of `max_tokens` that decodes leave."""
        room = max(max_tokens - len(self.chunks), max_tokens // 4, 1)
        self._budget = min(self._budget, room)

    def prefill_running(self) -> None:
        for sequence, remaining in self._prefills:
            if self._budget == 0:
                return
            if sequence not in self.preempted:
                number = self._within_pages(sequence, min(remaining, self._budget))
                if number:
                    self._add_chunk(sequence, sequence.num_computed, remaining, number)

    def admit_waiting(self, stop_before: Sequence | None) -> None:
        lanes = len(self._state.free_lanes)
        if self._budget == 0 or not lanes:
            return
        for sequence in self._state.waiting.forecast():
            if self._budget == 0 or min(lanes, self._spare_rows) < sequence.num_samples:
                return
            if sequence is stop_before:
                return
            matched = self._match(sequence)
            start = self._state.num_computed_after(sequence, matched)
            remaining = len(sequence.token_ids) - start
            number = min(remaining, self._budget)
            if not self._take_pages(sequence, matched, start + number):
                number = min(number, self._page_size - start % self._page_size)
                if not self._take_pages(sequence, matched, start + number):
                    return
            lanes -= sequence.num_samples
            self._spare_rows -= sequence.num_samples
            self.admissions.append(Admission(sequence, matched))
            self._add_chunk(sequence, start, remaining, number)

    def keep_states(self) -> tuple[Sequence, ...]:
        """Sequences whose mask may be late, and whose last token therefore writes its state to a
        page of its own. If none is available, the step waits for the mask."""
        if not self._state.has_states:
            return ()
        kept = []
        for sequence, start, num_tokens, num_samples, _, num_drafts in self.chunks:
            begins_page = (start + num_tokens - 1) % self._page_size == 0
            is_masked = num_samples > 0 and sequence.request.masks is not None
            # Each row with a draft has a page of its own anyway.
            if is_masked and not (begins_page or num_drafts) and self._available > 0:
                self._available -= 1
                kept.append(sequence)
        return tuple(kept)

    def _within_pages(self, sequence: Sequence, number: int) -> int:
        """How many of the next `number` tokens of a prompt find pages, possibly 0; takes the pages.

        Full groups have had all pages of a prompt since its admission; window groups get theirs
        here. If no page is available, sequences of lower rank that skip this step are preempted.
        """
        start, state = sequence.num_computed, self._state
        while state.num_missing_pages(sequence, start + number) > self._available:
            fewer = self._fitting(sequence) - start
            if fewer > 0:
                number = fewer
                break
            busy = {chunk.sequence for chunk in self.chunks}
            victim = None if self._is_ahead else self._find_victim(sequence, busy)
            if victim is None:
                return 0
            self._preempt(victim)
        self._available -= state.num_missing_pages(sequence, start + number)
        return number

    def _fitting(self, sequence: Sequence) -> int:
        """Tokens that fit the pages of a running sequence and those available for its windows."""
        tables = [len(pages) for pages in sequence.pages]
        shortest = min(tables)
        each = self._available // tables.count(shortest)
        return (shortest + each) * self._page_size

    def _add_chunk(self, sequence: Sequence, start: int, remaining: int, number: int) -> None:
        scored = 0
        if sequence.scores_prompt:
            number = self._within_rows(sequence, number, remaining)
            scored = min(number, remaining - 1)
            self.scores = self.scores or scored > 0
        self._budget -= number
        samples = sequence.num_samples if number == remaining else 0
        self._spare_rows -= max(0, scored + samples - sequence.num_samples)
        self.chunks.append(Chunk(sequence, start, number, samples, scored))

    def _within_rows(self, sequence: Sequence, number: int, remaining: int) -> int:
        """Tokens of a prompt, from 1 to `number`, if each of them needs a logit row.

        A sequence has as many rows as lanes, and those that no other sequence may need.
        """
        rows = sequence.num_samples + self._spare_rows
        if number == remaining and remaining - 1 > self._spare_rows:
            number = remaining - 1  # not its last one, which needs a row a sample
        return number if number == remaining else min(number, rows)

    def _match(self, sequence: Sequence) -> list[Node]:
        """Pages of the prefix cache; a prompt that is scored is computed from its start."""
        if not self._cache.enabled or sequence.scores_prompt:
            return []
        return self._cache.match(sequence.token_ids, self._state.namespace(sequence))

    def _secure_page(self, sequence: Sequence) -> bool:
        """Take pages for the sequence's next token, its own alone; returns whether it has them."""
        index = sequence.num_computed // self._page_size
        while wanted := [pages for pages in sequence.pages if self._wants_page(pages, index)]:
            if self._available >= len(wanted):
                self._available -= len(wanted)
                for pages in wanted:
                    if index < len(pages):
                        self._drop(pages[index])  # copied on write: one holder less
                return True
            victim = self._find_victim(sequence)
            self.must_wait = self._is_ahead and victim is not None
            if victim is None or self.must_wait:
                return False
            self._preempt(victim)
        return True

    def _wants_page(self, pages: list[int], index: int) -> bool:
        return index == len(pages) or self._num_holders(pages[index]) > 1

    def _num_holders(self, page: int) -> int:
        return self._cache.num_holders(page) - self._dropped.get(page, 0)

    def _drop(self, page: int) -> None:
        self._dropped[page] = self._dropped.get(page, 0) + 1

    def _find_victim(self, needy: Sequence, busy: Collection[Sequence] = ()) -> Sequence | None:
        """Of the sequences that rank below `needy`, and are not in `busy`, the one with the fewest
        tokens to recompute.

        A sequence whose pages are all shared frees nothing, and is chosen only as the last resort.
        """
        victim, least = None, (True, 0)
        for other in reversed(self._state.running):
            if other is needy:
                break
            if other in self.preempted or other in busy:
                continue
            frees = any(
                self._num_holders(page) == 1 for held in other.held_pages() for page in held
            )
            loss = (not frees, other.num_computed)
            if victim is None or loss < least:
                victim, least = other, loss
        return victim

    def _preempt(self, victim: Sequence) -> None:
        self.preempted[victim] = None
        for held in victim.held_pages():
            for page in held:
                self._available += self._num_holders(page) == 1
                self._drop(page)

    def _take_pages(self, sequence: Sequence, matched: list[Node], end: int) -> bool:
        """Take pages for the known tokens of a waiting sequence, in window groups for those before
        `end`; returns whether there were enough.

        A prompt gets all its pages of full groups at once, so a prefill under way never needs
        another. While others run, some pages are kept back for their growth, or the new sequence
        would soon be preempted.
        """
        revived, missing = self._pages_to_take(sequence, matched, end)
        if missing > 0:
            return False
        self._available -= self._state.num_new_pages(sequence, matched, end) + len(revived)
        self._claimed.update(revived)
        return True

    def _pages_to_take(
        self, sequence: Sequence, matched: list[Node], end: int
    ) -> tuple[list[int], int]:
        """Idle pages that an admission takes from the cache, and the number of pages missing."""
        new = self._state.num_new_pages(sequence, matched, end)
        revived = [
            page
            for page in self._cache.wanted(matched)
            if self._cache.is_idle(page) and page not in self._claimed
        ]
        num_running = len(self._state.running) + len(self.admissions)
        # A page of each group for every fourth: a few steps' growth.
        kept_back = -(-num_running * len(self._cache.pool.windows) // 4)
        return revived, new + len(revived) + kept_back - self._available

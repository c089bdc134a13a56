"""Decides what the next step computes. A pure decision: `scheduler_state.apply` carries it out.

In order of rank, and within the step's token budget:

1. each running sequence with one token left computes it (decode). If that needs a page and none is
   available, running sequences of lower rank are preempted, the one that loses least first; with
   none below it, the sequence sits this step out and keeps what it has;
2. running sequences with more tokens left compute a chunk of them (prefill), of bounded size where
   others decode;
3. waiting sequences are admitted while lanes and pages last, unless something was preempted.

The first in rank can take every page but its own and fits the pool alone, so it always advances;
nobody overtakes the first of the queue; ranks never change. Hence no livelock and no starvation.

While a step is in flight the next one is planned ahead: running sequences go on with tokens that
the host does not know. Two things are left until it does, and then nothing at all is planned:

- a sequence that would decode awaits its token (`Sequence.awaits_token`). The others wait with it:
  in steps that are planned by turns each would find half of the batch, and cost as much;
- somebody would have to be preempted. The step in flight may end a sequence and free its pages.
"""

from dataclasses import dataclass

from trtc.runtime.prefix_cache import Node
from trtc.runtime.scheduler_state import SchedulerState
from trtc.runtime.sequence import Sequence
from trtc.runtime.step_plan import Admission, Chunk, StepPlan


@dataclass(frozen=True)
class StepLimits:
    max_num_tokens: int
    """Tokens in one step."""
    max_tokens_beside_decodes: int | None = None
    """Tokens in a step that computes prompts beside decodes, which all wait for it; None: as many
    as fit. A quarter is the prompts' however many decode."""


def plan(state: SchedulerState, limits: StepLimits) -> StepPlan:
    """The next step. Does not change the state.

    It is empty only if nothing is left to compute, or not before the step in flight is complete.
    """
    draft = _Draft(state, limits)
    draft.decode_running()
    if draft.must_wait:
        return StepPlan()
    if draft.chunks and limits.max_tokens_beside_decodes is not None:
        draft.bound_prefill(limits.max_tokens_beside_decodes)
    draft.prefill_running()
    if not draft.preempted:
        draft.admit_waiting()
    return StepPlan(tuple(draft.preempted), tuple(draft.admissions), tuple(draft.chunks))


class _Draft:
    """A plan under way, with the pages as they would be after it."""

    def __init__(self, state: SchedulerState, limits: StepLimits) -> None:
        self._state = state
        self._cache = state.cache
        self._page_size = state.cache.pool.page_size
        self._budget = limits.max_num_tokens
        self._available = state.cache.num_available
        self._dropped: dict[int, int] = {}
        """page -> holders that this plan takes from it, by preemption or copy-on-write."""
        self._claimed: set[int] = set()
        """Idle pages that admissions of this plan hold."""
        self._is_ahead = state.num_in_flight > 0
        self.must_wait = False
        """Whether the step in flight must be complete before this one can be planned."""
        self._prefills: list[tuple[Sequence, int]] = []
        """Running sequences with more than one token left, and how many."""
        self.preempted: dict[Sequence, None] = {}
        self.admissions: list[Admission] = []
        self.chunks: list[Chunk] = []

    def decode_running(self) -> None:
        for sequence in self._state.running:
            if self._budget == 0 or self.must_wait:
                return
            remaining = sequence.num_remaining
            if remaining > 1:
                self._prefills.append((sequence, remaining))
            elif remaining == 1 and sequence not in self.preempted:
                self._decode(sequence)

    def _decode(self, sequence: Sequence) -> None:
        if sequence.num_pending and sequence.awaits_token:
            self.must_wait = True
        elif self._state.has_own_page(sequence) or self._secure_page(sequence):
            self._budget -= 1
            self.chunks.append(Chunk(sequence, sequence.num_computed, 1, sequence.num_samples))

    def bound_prefill(self, max_tokens: int) -> None:
        """Leave prompts what the decodes leave of so many tokens."""
        room = max(max_tokens - len(self.chunks), max_tokens // 4, 1)
        self._budget = min(self._budget, room)

    def prefill_running(self) -> None:
        for sequence, remaining in self._prefills:
            if self._budget == 0:
                return
            if sequence not in self.preempted:
                self._add_chunk(sequence, sequence.num_computed, remaining)

    def admit_waiting(self) -> None:
        lanes = len(self._state.free_lanes)
        for sequence in self._state.waiting:
            if self._budget == 0 or lanes < sequence.num_samples:
                return
            matched = self._cache.match(sequence.token_ids) if self._cache.enabled else []
            if not self._take_pages(sequence, matched):
                return
            lanes -= sequence.num_samples
            self.admissions.append(Admission(sequence, matched))
            start = self._state.num_computed_after(sequence, matched)
            self._add_chunk(sequence, start, len(sequence.token_ids) - start)

    def _add_chunk(self, sequence: Sequence, start: int, remaining: int) -> None:
        number = min(remaining, self._budget)
        self._budget -= number
        samples = sequence.num_samples if number == remaining else 0
        self.chunks.append(Chunk(sequence, start, number, samples))

    def _secure_page(self, sequence: Sequence) -> bool:
        """Whether the sequence gets a page of its own for its next token."""
        index = sequence.num_computed // self._page_size
        while self._wants_page(sequence, index):
            if self._available:
                self._available -= 1
                if index < len(sequence.pages):
                    self._drop(sequence.pages[index])  # copied on write: one holder less
                return True
            victim = self._find_victim(sequence)
            self.must_wait = self._is_ahead and victim is not None
            if victim is None or self.must_wait:
                return False
            self._preempt(victim)
        return True

    def _wants_page(self, sequence: Sequence, index: int) -> bool:
        if index == len(sequence.pages):
            return True
        return self._num_holders(sequence.pages[index]) > 1

    def _num_holders(self, page: int) -> int:
        return self._cache.num_holders(page) - self._dropped.get(page, 0)

    def _drop(self, page: int) -> None:
        self._dropped[page] = self._dropped.get(page, 0) + 1

    def _find_victim(self, needy: Sequence) -> Sequence | None:
        """Of those that rank below `needy`, the one with the fewest tokens to compute again.

        One whose pages are all shared frees nothing, and is taken only when all are like that.
        """
        victim, least = None, (True, 0)
        for other in reversed(self._state.running):
            if other is needy:
                break
            if other in self.preempted:
                continue
            frees = any(self._num_holders(page) == 1 for page in other.pages)
            loss = (not frees, other.num_computed)
            if victim is None or loss < least:
                victim, least = other, loss
        return victim

    def _preempt(self, victim: Sequence) -> None:
        self.preempted[victim] = None
        for page in victim.pages:
            self._available += self._num_holders(page) == 1
            self._drop(page)

    def _take_pages(self, sequence: Sequence, matched: list[Node]) -> bool:
        """Whether all known tokens of a waiting sequence find pages; if so they are taken.

        Whole prompts get their pages at once, so a prefill under way never needs another. While
        others run, some pages stay back for their growth, lest the newcomer be preempted at once.
        """
        new = self._state.num_new_pages(sequence, matched)
        revived = [
            node.page
            for node in matched
            if self._cache.is_idle(node.page) and node.page not in self._claimed
        ]
        num_running = len(self._state.running) + len(self.admissions)
        kept_back = -(-num_running // 4)  # a page for every fourth: a few steps' growth
        if new + len(revived) + kept_back > self._available:
            return False
        self._available -= new + len(revived)
        self._claimed.update(revived)
        return True

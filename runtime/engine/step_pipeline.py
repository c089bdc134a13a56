"""Executes planned steps: from the plan to the drawn tokens.

    launch     plan -> apply -> tables -> copies, launch ──┐
                                                     the executor works
    complete   drawn <- commit <- wait for the oldest <────┘

A step whose draws need masks, or tokens that the host does not know yet, is launched up to its
logits (Executor.launch_forward), and drawn when the host has them. If another step is in flight
before it, that is when the other is complete:

    launch     ... -> launch_forward ─────> masks, counts -> draw

If the executor runs ahead, the next step is planned, built and launched while one is in flight, so
that the device does not wait for the host:

    device    step 1          | step 2          | step 3          |
    host      launch 2 | wait | launch 3, emit 1 | wait | launch 4, emit 2 | ...
"""

import time
from collections import deque
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from trtc.protos.errors import TrtcError
from trtc.runtime.engine.step_builder import BuiltStep, StepBuilder
from trtc.runtime.executors.base import (
    MAX_STEPS_IN_FLIGHT,
    Executor,
    PendingStep,
    UndrawnStep,
)
from trtc.runtime.sampling.sampler import SampledTokens
from trtc.runtime.scheduling.scheduler_state import Drawn, SchedulerState
from trtc.runtime.scheduling.sequence import Sequence
from trtc.runtime.scheduling.step_plan import Scored, StepPlan

if TYPE_CHECKING:
    from trtc.runtime.engine.drafting import Drafter
    from trtc.runtime.engine.host_tier import HostTier
    from trtc.runtime.engine.mask_collector import MaskCollector


class CompletedStep(NamedTuple):
    """The drawn tokens of a step, after `SchedulerState.commit`."""

    drawn: list[Drawn]
    scored: list[Scored]
    tokens: SampledTokens
    num_tokens: int
    """Tokens that it computed."""
    num_sequences: int
    """Sequences of its batch; each draft may be one of its own (DraftRows)."""
    seconds: float
    """Seconds in which it was the oldest step in flight."""
    failures: Mapping[Sequence, TrtcError]
    """Sequences that must end, because their masks failed."""


_RECENT_STEPS = 64


class _StepInFlight(msgspec.Struct, eq=False):
    plan: StepPlan
    built: BuiltStep
    launched_at: float
    """time.perf_counter()"""
    num_reads: int
    """Reads of the host tier that began before the step, and so are complete when it is."""
    pending: PendingStep | None = None
    """None: the step is not drawn yet."""
    undrawn: UndrawnStep | None = None
    """None: the step was drawn at its launch."""
    held: Collection[Sequence] = ()
    """Sequences whose token is discarded: their masks are late, or failed."""
    failures: Mapping[Sequence, TrtcError] = msgspec.field(default_factory=dict)


class StepPipeline:
    """The steps of one engine in flight. Not thread-safe."""

    def __init__(
        self,
        executor: Executor,
        state: SchedulerState,
        *,
        max_context: int,
        tier: "HostTier | None" = None,
        drafter: "Drafter | None" = None,
        num_drafts: int = 0,
    ) -> None:
        """
        Args:
            tier: keeps pages that the state's prefix cache evicts.
            drafter: proposes at most `num_drafts` drafts per sequence; None: no drafts.
        """
        self._drafter = drafter
        self._num_drafts = num_drafts
        self._executor = executor
        self._masks: MaskCollector | None = None
        """None: no step has been drawn late. Where nothing constrains draws, none of its modules is
        imported."""
        self._tier = tier
        self._max_in_flight = MAX_STEPS_IN_FLIGHT if executor.runs_ahead else 1
        self._state = state
        self._builder = StepBuilder(
            num_lanes=state.num_lanes,
            max_context=max_context,
            page_size=state.cache.pool.page_size,
            num_groups=len(state.cache.pool.windows),
            state_group=state.cache.pool.state_group,
            counts_pending=executor.counts_pending,
            drafts_as_sequences=executor.draft_rows is not None
            and executor.draft_rows.as_sequences,
        )
        self._in_flight: deque[_StepInFlight] = deque()
        self._completed_at = 0.0
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        """Durations of the last steps. The shortest is assumed not to have waited for masks."""
        self.num_completed = 0
        self.busy_seconds = 0.0
        """Seconds in which at least one step was in flight."""

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_room(self) -> bool:
        """Whether another step may be launched before the oldest is complete."""
        return len(self._in_flight) < self._max_in_flight

    def launch(self, step_plan: StepPlan) -> None:
        """Launch the last planned step; `has_room` must be true.

        Raises:
            EnvironmentFault: the device failed.
        """
        assert self.has_room
        self._state.apply(step_plan)
        changes = self._state.take_changes()
        self._builder.follow(changes)
        built = self._builder.build(step_plan)
        launched_at = time.perf_counter()
        num_reads = 0
        if self._tier is not None:
            self._tier.flush()
            num_reads = self._tier.num_begun
        if changes.copies:
            sources, targets = zip(*changes.copies, strict=True)
            self._executor.copy_pages(sources, targets)
        step = _StepInFlight(step_plan, built, launched_at, num_reads)
        self._in_flight.append(step)
        if not built.is_drawn_late:
            step.pending = self._executor.launch(built.batch, built.sampling)
            return
        is_next = len(self._in_flight) == 1
        if is_next:
            self._collector().ask(built.masked)
        step.undrawn = self._executor.launch_forward(built.batch)
        if is_next:
            self._draw(step)

    def _collector(self) -> "MaskCollector":
        if self._masks is None:
            from trtc.runtime.engine.mask_collector import MaskCollector

            self._masks = MaskCollector(self._executor.vocab_size)
        return self._masks

    def _draw(self, step: _StepInFlight) -> None:
        """Draw a step that was launched up to its logits; those before it are complete."""
        assert step.undrawn is not None
        masked = [one for one in step.built.masked if one.sequence.lanes]
        may_be_late = all(self._state.can_hold(one.sequence) for one in masked)
        has_others = len(step.plan.chunks) > len(masked)
        free_s = min(self._step_seconds, default=0.0) if has_others else None
        collected = self._collector().collect(masked, may_be_late=may_be_late, free_s=free_s)
        step.failures = collected.failures
        step.held = {*collected.late, *collected.failures}
        for sequence in step.held:
            self._state.hold(sequence)
        sampling = self._builder.late_sampling(
            step.built, collected.masks, collected.biases, collected.last_rows
        )
        step.pending = step.undrawn.draw(sampling)

    def propose_drafts(self) -> None:
        """Before a step is planned, propose drafts for running sequences, if there is a drafter. If
        the last token of a sequence is pending, the first draft stands for that token."""
        if self._drafter is None:
            return
        room = self._state.max_draft_rows - len(self._state.running)
        for sequence in self._state.running:
            most = min(self._num_drafts, sequence.most_drafts, room)
            sequence.drafts = ()
            if most > 0:
                history, pending = self._builder.history(sequence), sequence.num_pending
                proposed = self._drafter.propose(sequence, history, pending + most)
                sequence.drafts = proposed[pending:]
                room -= len(sequence.drafts)
        self._state.has_drafts = True

    def release_held(self) -> None:
        """Before a step is planned, release held sequences whose masks are ready."""
        if self._masks is not None and self._masks.is_waiting:
            self._masks.release()

    def await_masks(self, seconds: float) -> bool:
        """With nothing in flight, wait for late masks; returns whether there are any."""
        if self._masks is None or not self._masks.is_waiting:
            return False
        self._masks.wait(seconds)
        return True

    def complete(self) -> CompletedStep:
        """Wait for the oldest step in flight, which must exist, and commit its tokens.

        Raises:
            EnvironmentFault: the device failed.
        """
        step = self._in_flight.popleft()
        assert step.pending is not None
        tokens = step.pending.wait()
        now = time.perf_counter()
        seconds = now - max(step.launched_at, self._completed_at)
        self.busy_seconds += seconds
        self._completed_at = now
        self._step_seconds.append(seconds)
        self.num_completed += 1
        if self._tier is not None:
            self._tier.land(step.num_reads)
        scored = step.plan.scored()
        drawn = self._state.commit(
            step.plan,
            tokens.token_ids.tolist(),
            tokens.invalid_rows,
            step.held,
            None if tokens.counts is None else tokens.counts.tolist(),
        )
        self._builder.append(step.built, tokens.token_ids, step.held)
        if self._in_flight and self._in_flight[0].pending is None:
            self._draw(self._in_flight[0])
        return CompletedStep(
            drawn,
            scored,
            tokens,
            num_tokens=len(step.built.batch.token_ids),
            num_sequences=len(step.built.batch.context_lens),
            seconds=seconds,
            failures=step.failures,
        )

    def drain(self) -> None:
        """Wait for all steps in flight, and discard their tokens.

        Raises:
            EnvironmentFault: the device failed.
        """
        if self._masks is not None:
            self._masks.close()
        while self._in_flight:
            step = self._in_flight.popleft()
            if step.pending is None:
                assert step.undrawn is not None
                step.pending = step.undrawn.draw(step.built.sampling)
            step.pending.wait()

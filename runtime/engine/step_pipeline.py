"""Carries out planned steps: from the decision to the drawn tokens.

    launch     plan -> apply -> tables -> copies, launch ──┐
                                                     the executor works
    complete   drawn <- commit <- wait for the oldest <────┘

With an executor that runs ahead, the next step is planned, built and launched while one is under
way, so that the device need not wait for the host:

    device    step 1          | step 2          | step 3          |
    host      launch 2 | wait | launch 3, tell 1 | wait | launch 4, tell 2 | ...
"""

import time
from collections import deque
from dataclasses import dataclass

from trtc.runtime.engine.step_builder import BuiltStep, StepBuilder
from trtc.runtime.executors.base import MAX_STEPS_IN_FLIGHT, Executor, PendingStep
from trtc.runtime.sampling.sampler import SampledTokens
from trtc.runtime.scheduling.scheduler_state import Drawn, SchedulerState
from trtc.runtime.scheduling.step_plan import Scored, StepPlan


@dataclass(frozen=True, eq=False)
class CompletedStep:
    """What a step drew, as the scheduler's state took it over."""

    drawn: list[Drawn]
    scored: list[Scored]
    tokens: SampledTokens
    num_tokens: int
    """That it computed."""
    num_sequences: int
    """That had one or more of them."""
    seconds: float
    """In which it was in flight and no earlier one was."""


@dataclass(frozen=True, eq=False)
class _StepInFlight:
    plan: StepPlan
    built: BuiltStep
    pending: PendingStep
    launched_at: float
    """time.perf_counter()"""


class StepPipeline:
    """The steps of one engine in flight; one thread uses it."""

    def __init__(self, executor: Executor, state: SchedulerState, *, max_context: int) -> None:
        self._executor = executor
        self._max_in_flight = MAX_STEPS_IN_FLIGHT if executor.runs_ahead else 1
        self._state = state
        self._builder = StepBuilder(
            num_lanes=state.num_lanes,
            max_context=max_context,
            page_size=state.cache.pool.page_size,
            num_groups=len(state.cache.pool.windows),
        )
        self._in_flight: deque[_StepInFlight] = deque()
        self._completed_at = 0.0
        self.num_completed = 0
        self.busy_seconds = 0.0
        """Time in which at least one step was in flight."""

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_room(self) -> bool:
        """Whether another step may be launched before the oldest is complete."""
        return len(self._in_flight) < self._max_in_flight

    def launch(self, step_plan: StepPlan) -> None:
        """Launch the step that was planned last; there must be room for it.

        Raises:
            EnvironmentFault: the device failed.
        """
        assert self.has_room
        self._state.apply(step_plan)
        changes = self._state.take_changes()
        self._builder.follow(changes)
        built = self._builder.build(step_plan)
        launched_at = time.perf_counter()
        if changes.copies:
            sources, targets = zip(*changes.copies, strict=True)
            self._executor.copy_pages(sources, targets)
        pending = self._executor.launch(built.batch, built.sampling)
        self._in_flight.append(_StepInFlight(step_plan, built, pending, launched_at))

    def complete(self) -> CompletedStep:
        """Wait for the oldest step in flight, of which there must be one, and take over its tokens.

        Raises:
            EnvironmentFault: the device failed.
        """
        step = self._in_flight.popleft()
        tokens = step.pending.wait()
        now = time.perf_counter()
        seconds = now - max(step.launched_at, self._completed_at)
        self.busy_seconds += seconds
        self._completed_at = now
        self.num_completed += 1
        scored = step.plan.scored()
        drawn = self._state.commit(step.plan, tokens.token_ids.tolist(), tokens.invalid_rows)
        self._builder.append(step.built, tokens.token_ids)
        num_sequences = len(step.plan.chunks)
        return CompletedStep(drawn, scored, tokens, step.plan.num_tokens, num_sequences, seconds)

    def drain(self) -> None:
        """Wait for all steps in flight; nobody wants what they draw.

        Raises:
            EnvironmentFault: the device failed.
        """
        while self._in_flight:
            self._in_flight.popleft().pending.wait()

"""One engine's loop: plan, execute, sample, apply, emit.

    submit, abort --> orders --> queue --> plan --> pages --> executor --> tokens --> sinks
    (any thread)     (lock)     └───────────────── the loop's thread ─────────────────────┘

If the executor runs ahead, the next step is launched before the last one's tokens are emitted
(step_pipeline.py). This is invisible to requests: an ended request gets no more output.

Every request that `submit` accepts ends exactly once: with an Output that carries its usage, or
with one error.
"""

import itertools
import os
import threading
import time
from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from trtc.protos.errors import (
    DeadlineError,
    InvalidRequestError,
    InvariantError,
    NoTokenizerError,
    RequestError,
    TrtcError,
    UnavailableError,
)
from trtc.protos.sampling import NO_DEFAULTS, SamplingDefaults
from trtc.runtime.engine.emission import Delivery, LiveRequest, Sink
from trtc.runtime.engine.step_pipeline import CompletedStep, StepPipeline
from trtc.runtime.executors.base import Executor
from trtc.runtime.host.logs import logger
from trtc.runtime.requests.principal import LOCAL, SHARED, Principal
from trtc.runtime.requests.request import GenerationRequest, TokenLogprobs
from trtc.runtime.requests.validation import RequestBounds, validate
from trtc.runtime.sampling.sampler import Int32s, Logprobs
from trtc.runtime.scheduling.deadlines import Deadlines
from trtc.runtime.scheduling.kv_pool import KvPool
from trtc.runtime.scheduling.pace import Pace
from trtc.runtime.scheduling.prefix_cache import PrefixCache
from trtc.runtime.scheduling.scheduler import StepLimits, plan
from trtc.runtime.scheduling.scheduler_state import AGEING_S, OVERDUE_S, SchedulerState
from trtc.runtime.scheduling.sequence import Sequence as RunningSequence
from trtc.runtime.scheduling.sequence import rank_of
from trtc.runtime.scheduling.shares import Resource, Shares
from trtc.runtime.scheduling.step_plan import Scored, StepPlan
from trtc.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from trtc.runtime.engine.cache_feed import CacheFeed
    from trtc.runtime.engine.drafting import DraftConfig, Drafter
    from trtc.runtime.engine.host_tier import HostTier, TierWatcher
    from trtc.runtime.engine.kv_events import EventLog
    from trtc.runtime.scheduling.cache_events import CacheEvents

__all__ = ["Delivery", "EngineLoop", "LoopConfig", "LoopStats", "Sink"]

_IDLE_CHECK_AFTER_S = 1.0
"""Idle seconds after which the pool's integrity is checked once, and the device periodically."""

_MASK_WAIT_S = 0.05
"""Seconds between two checks for submissions and aborts while every sequence waits for a mask."""


class LoopConfig(msgspec.Struct, frozen=True):
    """Settings of one engine's loop."""

    eos_token_ids: tuple[int, ...] = ()
    defaults: SamplingDefaults = NO_DEFAULTS
    """Sampling parameters of requests that leave them out."""
    max_queue: int = 1024
    """Most requests that wait; beyond it, or beyond a client's share, QueueFullError."""
    prefix_cache: bool = True
    kv_host_bytes: int = 0
    """Bytes of host memory for pages that the prefix cache evicts; 0: no host tier."""
    kv_events: bool = False
    """Whether to log which pages are cached and evicted."""
    drafts: "DraftConfig | None" = None
    """Speculative decoding; None: off."""
    step_target_s: float = 0.17
    """Seconds that a step with decodes should take at most: prompts are cut to fit, and pages are
    restored from the host tier for half of it before the step. 0: no limit."""
    ageing_s: float = AGEING_S
    overdue_s: float = OVERDUE_S
    """As in scheduler_state."""


class LoopStats(NamedTuple):
    """A snapshot; counters grow from the loop's start."""

    running: int = 0
    """Sequences that hold pages."""
    waiting: int = 0
    """Sequences in the queue, preempted ones included."""
    pages_total: int = 0
    pages_used: int = 0
    """Held by running sequences."""
    pages_cached: int = 0
    """Held only by the prefix cache; evicted if pages are needed."""
    pages_free: int = 0
    prefix_query_tokens: int = 0
    """Tokens looked up in the prefix cache when sequences were admitted."""
    prefix_hit_tokens: int = 0
    host_pages_total: int = 0
    """Pages that the host tier has room for; 0: there is no host tier."""
    host_pages_used: int = 0
    host_hit_tokens: int = 0
    """Prompt tokens whose pages came from the host tier; part of prefix_hit_tokens."""
    host_saved_bytes: int = 0
    """Bytes copied from the pool to the host tier."""
    host_restored_bytes: int = 0
    """Bytes copied from the host tier to the pool."""
    kv_events_lost: int = 0
    """Events of the prefix cache that the log missed because its queue was full."""
    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    """Tokens prefilled, recomputed ones included."""
    generated_tokens: int = 0
    draft_tokens: int = 0
    """Drafts that steps verified."""
    accepted_draft_tokens: int = 0
    """Drafts that were accepted."""
    requests_admitted: int = 0
    """Accepted by `submit`."""
    requests_finished: int = 0
    """Ended with a result, aborted ones included."""
    requests_failed: int = 0
    """Ended with an error."""
    step_seconds: float = 0.0
    """Seconds in which at least one step was in flight."""
    work_seconds: float = 0.0
    """Seconds in which the loop had work: steps, and the loop's own work between them."""


class EngineLoop:
    """Drives one executor from one thread. All public methods may be called from any thread."""

    def __init__(self, executor: Executor, tokenizer: Tokenizer | None, config: LoopConfig) -> None:
        """
        Raises:
            RequestError, UnsupportedError, EnvironmentFault: a host tier of `kv_host_bytes` is not
                possible.
            UnsupportedError, RequestError: `config.drafts` is not possible; see `drafter_of`.
        """
        self._executor = executor
        self._tokenizer = tokenizer
        self._config = config
        limits, kv = executor.limits, executor.kv
        drafter = _drafter(executor, config)
        self._bounds = RequestBounds(
            vocab_size=executor.vocab_size,
            max_context=kv.longest_sequence(executor.num_pages, limits.max_seq_len),
            max_sequences=limits.max_batch_size,
            defaults=config.defaults,
        )
        self._eos = frozenset(config.eos_token_ids)
        self._numbers = itertools.count()

        # Shared between threads, under the lock.
        self._changed = threading.Condition()
        self._live: dict[int, LiveRequest] = {}
        """Live requests by number."""
        self._number_of: dict[tuple[Principal, str], int] = {}
        """(principal, request id) -> number, for every live request."""
        self._submitted: list[LiveRequest] = []
        self._aborted: list[int] = []
        self._queue = Shares(Resource("queue", config.max_queue, "waiting requests", "--max-queue"))
        self._num_delivering = 0
        """Requests that are no longer live, and whose last delivery is under way."""
        self._refusal = ""
        """Why new requests are refused; "": they are not."""
        self._stopping = False
        self._failure = ""
        self._stats = LoopStats(pages_total=executor.num_pages, pages_free=executor.num_pages)

        # The loop's thread only.
        pool = KvPool(executor.num_pages, kv.page_size, kv.windows)
        self._feed = _cache_feed(config)
        self._tier = _host_tier(executor, config, self._feed)
        events = _cache_events(self._feed, self._tier)
        self.kv_events: EventLog | None = None
        """Log of cached and evicted pages, for any thread; None: not enabled."""
        if self._feed is not None and events is not None:
            self.kv_events = _event_log(self._feed, events, pool)
        cache = PrefixCache(pool, enabled=config.prefix_cache, events=events)
        self._state = SchedulerState(
            cache,
            num_lanes=limits.max_batch_size,
            rope_switch=limits.rope_switch,
            max_draft_rows=0 if executor.draft_rows is None else executor.draft_rows.most,
            ageing_s=config.ageing_s,
            overdue_s=config.overdue_s,
        )
        self._pace = Pace(StepLimits(limits.max_num_tokens), config.step_target_s)
        self._restorer = (
            None
            if self._tier is None or events is None
            else self._tier.restorer(self._state, events)
        )
        self._pipeline = StepPipeline(
            executor,
            self._state,
            max_context=self._bounds.max_context,
            tier=self._tier,
            drafter=drafter,
            num_drafts=0 if config.drafts is None else config.drafts.num_tokens,
        )
        self._sequences: dict[int, list[RunningSequence]] = {}
        """Sequences of each live request that the loop's thread has taken over."""
        self._deadlines = Deadlines()
        self._num_finished = 0
        self._num_failed = 0
        self._work_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="trtc-engine-loop", daemon=True)

    # Any thread.

    @property
    def bounds(self) -> RequestBounds:
        """Limits of this engine's requests."""
        return self._bounds

    def start(self) -> None:
        """Start the thread; requests may have been submitted before."""
        if self.kv_events is not None:
            self.kv_events.start()
        self._thread.start()

    def submit(self, request: GenerationRequest, sink: Sink) -> int:
        """Queue a request. `sink` is called from the loop's thread, at most once per step, with the
        request's new Outputs, of which the last carries `usage`; or, as the last call, with a
        TrtcError. A sink that raises ends its request.

        Returns:
            The request's number in this loop, for `cancel`.

        Raises:
            InvalidRequestError: a field is out of range, or the principal has a live request of
                this id.
            NoTokenizerError: stop strings without a tokenizer.
            DeadlineError: the deadline has passed.
            QueueFullError: too many requests wait, of all or of this principal.
            UnavailableError: draining, stopped or dead.
        """
        validate(request, self._bounds)
        if request.stop and self._tokenizer is None:
            raise NoTokenizerError(
                "the engine has no tokenizer", field="stop", remedy="Give stop_token_ids"
            )
        live = LiveRequest(
            _with_seed(request),
            sink,
            self._tokenizer,
            number=next(self._numbers),
            submitted_at=time.monotonic(),
        )
        with self._changed:
            self._check_open(request)
            live.place = self._queue.take(request.principal)
            self._live[live.number] = live
            self._number_of[live.id] = live.number
            self._submitted.append(live)
            self._changed.notify_all()
        return live.number

    def abort(self, request_id: str, principal: Principal = LOCAL) -> bool:
        """End a request of `principal`; its sequences finish with ABORTED. False: none is live."""
        with self._changed:
            number = self._number_of.get((principal, request_id))
        return number is not None and self.cancel(number)

    def cancel(self, number: int) -> bool:
        """`abort` for the request of this number from `submit`, of any principal."""
        with self._changed:
            if number not in self._live:
                return False
            self._aborted.append(number)
            self._changed.notify_all()
            return True

    def healthy(self) -> bool:
        """Whether the loop's thread runs."""
        return self._thread.is_alive() and not self._stopping

    @property
    def failure(self) -> str:
        """The error that ended the thread; "": none did."""
        return self._failure

    def drain(self, timeout: float | None) -> bool:
        """Refuse new requests and wait until the live ones have ended; False at the timeout."""
        with self._changed:
            self._refusal = self._refusal or "the engine is draining"
            return self._changed.wait_for(
                lambda: not self._live and not self._num_delivering, timeout
            )

    def stop(self) -> None:
        """End the thread after its step; live requests get UnavailableError. Idempotent. The
        executor stays open."""
        with self._changed:
            self._stopping = True
            self._refusal = self._refusal or "the engine has stopped"
            self._changed.notify_all()
        if self._thread.ident is None:  # never started: nothing else will end them
            self._fail_all(UnavailableError("the engine has stopped"))
        elif self._thread is not threading.current_thread():
            self._thread.join()
        if self.kv_events is not None:
            self.kv_events.close()

    def stats(self) -> LoopStats:
        return self._stats

    def _check_open(self, request: GenerationRequest) -> None:
        if self._refusal:
            raise UnavailableError(self._refusal, remedy="Send the request to another server")
        if (request.principal, request.request_id) in self._number_of:
            raise InvalidRequestError(
                f"{request.request_id!r} is the id of a live request",
                field="request_id",
                remedy="Choose another, or leave it empty",
            )

    # The loop's thread.

    def _run(self) -> None:
        try:
            while self._take_orders():
                begin = time.perf_counter()
                if self._has_work():
                    self._advance()
                    self._work_seconds += time.perf_counter() - begin
                self._publish_stats()
            self._pipeline.drain()
            error = UnavailableError("the engine has stopped")
        except Exception as failure:  # noqa: BLE001 (a thread's last frame: no request may hang)
            logger(__name__).critical("the engine loop died", exc_info=failure)
            self._failure = str(failure) or type(failure).__name__
            error = UnavailableError(
                f"the engine has failed: {failure}", remedy="Restart the server"
            )
            error.__cause__ = failure
        self._fail_all(error)

    def _take_orders(self) -> bool:
        """Wait for work, and process submissions and aborts; False: stop."""
        self._wait_for_work()
        with self._changed:
            aborted, self._aborted = self._aborted, []
            if self._stopping:
                return False
        self._enqueue_submitted()
        for number in aborted:
            self._end_aborted(number)
        self._end_overdue()
        return True

    def _wait_for_work(self) -> None:
        """Sleep until there is work; meanwhile check the pool once and the device periodically."""
        is_checked = False
        while not self._is_needed(within_s=_IDLE_CHECK_AFTER_S):
            # Without the lock: submissions must not wait for the check.
            self._executor.check()
            is_checked = is_checked or self._check_state()

    def _is_needed(self, within_s: float) -> bool:
        """Whether there are orders or work, now or within `within_s` seconds."""
        with self._changed:
            return self._changed.wait_for(self._has_orders_or_work, timeout=within_s)

    def _has_orders_or_work(self) -> bool:
        return bool(self._submitted or self._aborted or self._stopping) or self._has_work()

    def _check_state(self) -> bool:
        """Check the scheduler's integrity; False: work came before the end."""
        return not any(self._has_orders_or_work() for _ in self._state.integrity_checks())

    def _has_work(self) -> bool:
        return self._state.has_work or self._pipeline.num_in_flight > 0

    def _enqueue_submitted(self) -> None:
        with self._changed:
            submitted, self._submitted = self._submitted, []
        self._state.tick(time.monotonic())
        for live in submitted:
            self._enqueue(live)

    def _enqueue(self, live: LiveRequest) -> None:
        request, number = live.request, live.number
        order = rank_of(request.priority, live.submitted_at, number, self._config.ageing_s)
        sequence = RunningSequence(request, number=number, order=order, eos_token_ids=self._eos)
        self._sequences[number] = [sequence]
        self._state.enqueue(sequence)
        if request.deadline is not None:
            self._deadlines.add(number, request.deadline)

    def _advance(self) -> None:
        """Launch what can be launched, complete the oldest step, and deliver its tokens.

        Delivery wakes threads that compete for the GIL. So if the executor runs ahead, whose
        launches return at once, the next step is launched first.
        """
        self._launch_all()
        if not self._pipeline.num_in_flight:
            if self._pipeline.await_masks(_MASK_WAIT_S):
                return
            raise InvariantError("requests are waiting, but the scheduler finds nothing to do")
        completed = self._pipeline.complete()
        self._pace.took(completed.num_tokens, completed.num_sequences, completed.seconds)
        if self._executor.runs_ahead:
            self._enqueue_submitted()  # new requests need not wait for another step
            self._launch_all()
        self._emit(completed)

    def _launch_all(self) -> None:
        while self._pipeline.has_room and self._launch_next():
            pass

    def _launch_next(self) -> bool:
        """Plan the next step and launch it; False: there is none yet."""
        self._pipeline.release_held()
        self._pipeline.propose_drafts()
        step_plan = self._plan()
        if not step_plan.chunks:
            return False
        for sequence, _ in step_plan.admissions:
            live = self._live[sequence.number]
            if live.scheduled_at is None:  # else it was preempted before
                live.scheduled_at = time.monotonic()
            self._leave_queue(live)
        self._pipeline.launch(step_plan)
        return True

    def _plan(self) -> StepPlan:
        """The next step, for whose prompts pages are restored from the host tier. Other sequences
        wait for that half a step's time at most."""
        step_plan = plan(self._state, self._pace.limits)
        if self._restorer is None or not step_plan.admissions:
            return step_plan
        has_others = len(step_plan.chunks) > len(step_plan.admissions)
        until = None
        if self._config.step_target_s and (has_others or self._pipeline.num_in_flight):
            until = time.perf_counter() + self._config.step_target_s / 2
        restored = self._restorer.restore(step_plan.admissions, until)
        if restored.any_pages:
            step_plan = plan(self._state, self._pace.limits, stop_before=restored.unfinished)
        return step_plan

    def _emit(self, completed: CompletedStep) -> None:
        """Add a step's tokens to their requests, and deliver the requests' outputs to the sinks."""
        drawn, tokens = completed.drawn, completed.tokens
        logprobs = _logprobs_by_row(tokens.logprobs, tokens.token_ids, self._tokenizer)
        touched: dict[int, LiveRequest] = {}
        stopped: list[RunningSequence] = []
        for scored in completed.scored:
            live = self._live[scored.sequence.number]
            if live.add_prompt_logprobs(scored.position, _scores(scored, logprobs)):
                touched[live.number] = live
        for sequence, row, token_id, reason in drawn:
            if stopped and stopped[-1] is sequence:
                continue  # ended by a stop string before the last of its tokens of this step
            number, index = sequence.number, sequence.index
            live = touched[number] = self._live[number]
            if index and index == len(self._sequences[number]):  # a fork
                self._sequences[number].append(sequence)
            if live.add(index, token_id, reason, logprobs.get(row, ())):
                stopped.append(sequence)
        self._state.finish(stopped)
        for number in _invalid(completed) if tokens.invalid_rows else ():
            error = InvariantError("the model gave no finite logits")
            touched.pop(number, None)
            self._end_failed(self._live[number], error)
        for sequence, refusal in completed.failures.items():
            if sequence.lanes:  # else its request has ended meanwhile
                touched.pop(sequence.number, None)
                self._end_failed(self._live[sequence.number], refusal)
        for live in touched.values():
            self._deliver_outputs(live)

    def _deliver_outputs(self, live: LiveRequest) -> None:
        if live.finished:
            cached = self._sequences[live.number][0].cached_prompt_tokens or 0
            self._num_finished += 1
            self._end(live, live.take_last_outputs(cached))
        elif not self._call(live, live.take_outputs()):
            self._num_failed += 1
            self._forget(live)

    def _end_aborted(self, number: int) -> None:
        live = self._live.get(number)
        if live is not None:  # else it has ended meanwhile
            live.abort()
            self._deliver_outputs(live)

    def _end_overdue(self) -> None:
        for number in self._deadlines.take_overdue(time.monotonic()):
            error = DeadlineError(
                "passed", field="deadline", remedy="Allow more time, or ask for fewer tokens"
            )
            self._end_failed(self._live[number], error)

    def _end_failed(self, live: LiveRequest, error: TrtcError) -> None:
        self._num_failed += 1
        self._end(live, error)

    def _end(self, live: LiveRequest, last: Delivery) -> None:
        """Release a request's resources, count it, and make its last delivery."""
        with self._changed:
            self._num_delivering += 1
        self._forget(live)
        self._publish_stats()
        self._call(live, last)
        with self._changed:
            self._num_delivering -= 1
            self._changed.notify_all()

    def _forget(self, live: LiveRequest) -> None:
        """Release all resources of a request."""
        self._state.finish(self._sequences.pop(live.number))
        self._deadlines.discard(live.number)
        self._leave_queue(live)
        with self._changed:
            del self._live[live.number]
            del self._number_of[live.id]
            self._changed.notify_all()

    def _leave_queue(self, live: LiveRequest) -> None:
        if live.place is not None and live.place.is_taken:
            with self._changed:
                live.place.free()

    def _call(self, live: LiveRequest, delivery: Delivery) -> bool:
        """Call a sink; returns whether it did not raise."""
        try:
            live.sink(delivery)
        except Exception:  # noqa: BLE001 (a caller's fault ends its request, not the engine)
            logger(__name__).exception("the sink of request %s raised", live.request.request_id)
            return False
        return True

    def _fail_all(self, error: UnavailableError) -> None:
        """End every live request; the last thing the loop does."""
        with self._changed:
            self._refusal = error.problem
            self._stopping = True
            live, self._live = list(self._live.values()), {}
            self._number_of.clear()
            self._changed.notify_all()
        self._num_failed += len(live)
        self._publish_stats()  # before the sinks, which may read the statistics
        for one in live:
            self._call(one, error)

    def _publish_stats(self) -> None:
        state = self._state
        cache, counters = state.cache, state.counters
        num_free, num_idle = cache.pool.num_free, cache.num_idle
        total = cache.pool.num_pages
        self._stats = LoopStats(
            running=len(state.running),
            waiting=len(state.waiting) + len(self._submitted),
            pages_total=total,
            pages_used=total - num_free - num_idle,
            pages_cached=num_idle,
            pages_free=num_free,
            prefix_query_tokens=counters.prefix_query_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            **self._tier_stats(),
            kv_events_lost=0 if self._feed is None else self._feed.num_lost,
            preemptions=counters.preemptions,
            steps=self._pipeline.num_completed,
            prompt_tokens=counters.prefilled_tokens,
            generated_tokens=counters.drawn_tokens,
            draft_tokens=counters.drafted_tokens,
            accepted_draft_tokens=counters.accepted_tokens,
            requests_admitted=self._num_admitted(),
            requests_finished=self._num_finished,
            requests_failed=self._num_failed,
            step_seconds=self._pipeline.busy_seconds,
            work_seconds=self._work_seconds,
        )

    def _tier_stats(self) -> dict[str, int]:
        if self._tier is None or self._restorer is None:
            return {}
        return {
            "host_pages_total": self._tier.num_slots,
            "host_pages_used": self._tier.num_used,
            "host_hit_tokens": self._restorer.num_tokens,
            "host_saved_bytes": self._tier.saved_bytes,
            "host_restored_bytes": self._tier.restored_bytes,
        }

    def _num_admitted(self) -> int:
        return self._num_finished + self._num_failed + len(self._live)


def _drafter(executor: Executor, config: LoopConfig) -> "Drafter | None":
    if config.drafts is None:
        return None
    from trtc.runtime.engine.drafting import drafter_of  # few engines have one

    return drafter_of(config.drafts, executor)


def _cache_feed(config: LoopConfig) -> "CacheFeed | None":
    if not config.kv_events:
        return None
    if not config.prefix_cache:
        raise RequestError(
            "publishes the prefix cache, and there is none",
            field="kv_events",
            remedy="Leave it out, or keep the prefix cache",
        )
    from trtc.runtime.engine.cache_feed import CacheFeed  # few engines have one

    return CacheFeed(has_tier=config.kv_host_bytes > 0)


def _host_tier(
    executor: Executor, config: LoopConfig, watcher: "TierWatcher | None"
) -> "HostTier | None":
    if not config.kv_host_bytes:
        return None
    if not config.prefix_cache:
        raise RequestError(
            "keeps what the prefix cache evicts, and there is none",
            field="kv_host_bytes",
            remedy="Leave it out, or keep the prefix cache",
        )
    from trtc.runtime.engine.host_tier import HostTier  # few engines have one

    return HostTier(executor, config.kv_host_bytes, watcher)


def _cache_events(feed: "CacheFeed | None", tier: "HostTier | None") -> "CacheEvents | None":
    if feed is None and tier is None:
        return None
    from trtc.runtime.scheduling.cache_events import CacheEvents

    return CacheEvents(os.urandom(32), [one for one in (feed, tier) if one is not None])


def _event_log(feed: "CacheFeed", events: "CacheEvents", pool: KvPool) -> "EventLog":
    from trtc.runtime.engine.kv_events import EventLog
    from trtc.runtime.scheduling.cache_events import namespace_name

    shared = namespace_name(events.key_of_root(SHARED))
    return EventLog(feed, pool.page_size, pool.windows, shared)


def _with_seed(request: GenerationRequest) -> GenerationRequest:
    if request.sampling.seed is not None:
        return request
    seed = int.from_bytes(os.urandom(8), "little")
    return replace(request, sampling=replace(request.sampling, seed=seed))


def _invalid(completed: CompletedStep) -> set[int]:
    """Numbers of the requests with a row of invalid logits."""
    invalid = completed.tokens.invalid_rows
    drawn = {one.sequence.number for one in completed.drawn if one.row in invalid}
    return drawn | {
        scored.sequence.number
        for scored in completed.scored
        if any(scored.row <= row < scored.row + scored.num_tokens for row in invalid)
    }


def _scores(
    scored: Scored, logprobs: Mapping[int, tuple[TokenLogprobs, ...]]
) -> list[TokenLogprobs]:
    """Log-probabilities of the prompt's tokens from `scored.position` on."""
    entries = []
    for at in range(scored.num_tokens):
        (entry,) = logprobs[scored.row + at]
        token_id = scored.sequence.token_ids[scored.position + at]
        # Another token was drawn: this one has probability 0.
        is_possible = entry.token_id == token_id
        if not is_possible:
            entry = msgspec.structs.replace(entry, token_id=token_id, logprob=-inf)
        entries.append(entry)
    return entries


def _logprobs_by_row(
    logprobs: Logprobs | None, token_ids: Int32s, tokenizer: Tokenizer | None
) -> dict[int, tuple[TokenLogprobs, ...]]:
    if logprobs is None:
        return {}

    def utf8_of(token_id: int) -> bytes:
        return b"" if tokenizer is None else tokenizer.token_utf8(token_id)

    by_row: dict[int, tuple[TokenLogprobs, ...]] = {}
    for at, (row, value) in enumerate(
        zip(logprobs.rows.tolist(), logprobs.token.tolist(), strict=True)
    ):
        number = logprobs.num_top[at]
        ids, values = logprobs.top_ids[at, :number], logprobs.top[at, :number]
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        token_id = int(token_ids[row])
        by_row[row] = (
            TokenLogprobs(
                token_id,
                value,
                top,
                tuple(utf8_of(token) for token, _ in top),
                utf8_of(token_id),
            ),
        )
    return by_row

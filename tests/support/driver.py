"""Drives the scheduler over the echo executor, one step a call, in the test's own thread."""

import itertools
from collections.abc import Sequence as Items
from math import inf

from tests.support.cache_book import CacheBook
from tests.support.lazy import LazyEcho
from tests.support.masks import PromptCollector
from tests.support.requests import greedy_request
from trtc.runtime.engine.cache_feed import MAX_EVENTS, CacheFeed
from trtc.runtime.engine.drafting import Drafter
from trtc.runtime.engine.host_tier import HostTier
from trtc.runtime.engine.kv_events import MAX_BATCHES, EventLog
from trtc.runtime.engine.step_pipeline import StepPipeline
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.requests.principal import SHARED
from trtc.runtime.requests.request import GenerationRequest
from trtc.runtime.scheduling.cache_events import CacheEvents, CacheListener, namespace_name
from trtc.runtime.scheduling.kv_pool import KvPool
from trtc.runtime.scheduling.prefix_cache import PrefixCache
from trtc.runtime.scheduling.restoring import PrefixRestorer
from trtc.runtime.scheduling.scheduler import StepLimits, plan
from trtc.runtime.scheduling.scheduler_state import SchedulerState
from trtc.runtime.scheduling.sequence import Sequence, Status, rank_of
from trtc.runtime.scheduling.step_plan import StepPlan

AGEING_S = 10.0
OVERDUE_S = 60.0


class Driver:
    """The loop without threads, text and sinks. Time is whatever the test says."""

    def __init__(
        self,
        options: EchoOptions,
        *,
        prefix_cache: bool = True,
        ahead: bool = False,
        mask_lateness: float = 0.0,
        host_pages: int = 0,
        drafter: Drafter | None = None,
        max_kv_events: int = MAX_EVENTS,
        max_kv_batches: int = MAX_BATCHES,
    ) -> None:
        """
        Args:
            host_pages: of a tier in the host's memory; 0: there is none.
        """
        self.executor = LazyEcho(options) if ahead else EchoExecutor(options)
        pool = KvPool(options.num_pages, options.page_size, options.windows)
        self.book = CacheBook()
        feed = CacheFeed(has_tier=host_pages > 0, max_events=max_kv_events)
        self.tier: HostTier | None = None
        if host_pages:
            self.tier = HostTier(self.executor, host_pages * self.executor.kv.page_bytes, feed)
            self.tier.pages_per_copy = 1
        listeners: list[CacheListener] = [self.book, feed, *([self.tier] if self.tier else [])]
        events = CacheEvents(b"secret", listeners)
        shared = namespace_name(events.key_of_root(SHARED))
        self.log = EventLog(
            feed, options.page_size, options.windows, shared, max_batches=max_kv_batches
        )
        cache = PrefixCache(pool, enabled=prefix_cache, events=events)
        self.state = SchedulerState(
            cache,
            num_lanes=options.max_batch_size,
            rope_switch=options.rope_switch,
            max_draft_rows=options.draft_rows.most if options.draft_rows else 0,
            ageing_s=AGEING_S,
            overdue_s=OVERDUE_S,
        )
        self.limits = StepLimits(options.max_num_tokens)
        max_context = self.executor.kv.longest_sequence(options.num_pages, options.max_seq_len)
        self.pipeline = StepPipeline(
            self.executor,
            self.state,
            max_context=max_context,
            tier=self.tier,
            drafter=drafter,
            num_drafts=4,
        )
        self.restorer = PrefixRestorer(self.state, events, self.tier) if self.tier else None
        self.masks = PromptCollector(options.vocab_size, lateness=mask_lateness)
        self.pipeline._masks = self.masks
        self._numbers = itertools.count()
        self.now = 0.0
        self.num_unfinished = 0
        """Steps before which pages of a prompt were restored, but not all."""
        self.planned = StepPlan()
        """The last step."""
        self.sequences: dict[str, list[Sequence]] = {}
        """All sequences of each request, finished ones too."""

    def submit(self, request: GenerationRequest, *, eos: frozenset[int] = frozenset()) -> Sequence:
        number = next(self._numbers)
        order = rank_of(request.priority, self.now, number, AGEING_S)
        sequence = Sequence(request, number=number, order=order, eos_token_ids=eos)
        self.state.tick(self.now)
        self.sequences[request.request_id] = [sequence]
        self.state.enqueue(sequence)
        return sequence

    def abort(self, request_id: str) -> None:
        self.state.finish(self.sequences.pop(request_id))

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that steps were launched with before the host knew them."""
        return self.executor.num_pending_tokens if isinstance(self.executor, LazyEcho) else 0

    @property
    def num_counted_tokens(self) -> int:
        """Tokens that penalties counted before the host knew them."""
        return self.executor.num_counted if isinstance(self.executor, LazyEcho) else 0

    @property
    def is_busy(self) -> bool:
        return self.state.has_work or self.pipeline.num_in_flight > 0

    def step(self) -> StepPlan:
        """What the loop does in one turn; the plan that was launched last."""
        while self.pipeline.has_room and self.launch():
            pass
        self.complete()
        return self.planned

    def launch(self) -> bool:
        """Launch the next step, if there is one; nothing may wait in vain."""
        self.state.tick(self.now)
        self.pipeline.release_held()
        self.pipeline.propose_drafts()
        step_plan = self._plan()
        if not step_plan.chunks and not self.pipeline.num_in_flight:
            self.pipeline.await_masks(0)
            step_plan = plan(self.state, self.limits)
        num_tokens = sum(chunk.num_tokens for chunk in step_plan.chunks)
        assert num_tokens <= self.limits.max_num_tokens
        if not step_plan.chunks:
            assert not self.state.has_work or self.pipeline.num_in_flight, "nothing is planned"
            return False
        self.now += 1.0
        self.planned = step_plan
        self.pipeline.launch(step_plan)
        return True

    def _plan(self) -> StepPlan:
        """In three of four steps that others compute, only one copy's pages are restored."""
        step_plan = plan(self.state, self.limits)
        if not self.restorer:
            return step_plan
        has_others = len(step_plan.chunks) > len(step_plan.admissions)
        until = None
        if int(self.now) % 4 and (has_others or self.pipeline.num_in_flight):
            until = -inf
        restored = self.restorer.restore(step_plan.admissions, until)
        if restored.any_pages:
            step_plan = plan(self.state, self.limits, stop_before=restored.unfinished)
            admitted = {one.sequence for one in step_plan.admissions}
            assert restored.unfinished not in admitted
            # A longer match may take more pages, so that fairness preempts a sequence: that waits
            # for the step in flight.
            assert not has_others or step_plan.chunks or self.pipeline.num_in_flight
        self.num_unfinished += restored.unfinished is not None
        return step_plan

    def complete(self) -> None:
        """Take in the oldest step in flight."""
        for sequence, *_ in self.pipeline.complete().drawn:
            known = self.sequences[sequence.request.request_id]
            if sequence.index == len(known):
                known.append(sequence)

    def run(self, max_steps: int = 10_000) -> int:
        """Step until nothing is live; how many steps it took."""
        for number in range(max_steps):
            if not self.is_busy:
                return number
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    def has_finished(self, request_id: str) -> bool:
        return all(one.status is Status.FINISHED for one in self.sequences[request_id])

    def outputs(self, request_id: str) -> list[list[int]]:
        """Output tokens of each sequence, by index."""
        return [one.token_ids[one.num_prompt :] for one in self.sequences[request_id]]


def solo_outputs(request: GenerationRequest, options: EchoOptions) -> list[list[int]]:
    """What a request gives alone: one chunk, no cache, a pool that nobody else uses."""
    length = len(request.prompt_ids) + request.max_tokens
    pages = request.n * (-(-length // options.page_size) + 1) * len(options.windows)
    alone = EchoOptions(
        vocab_size=options.vocab_size,
        num_pages=pages,
        page_size=options.page_size,
        windows=options.windows,
        max_batch_size=request.n,
        max_seq_len=options.max_seq_len,
        max_num_tokens=length + request.n,
        never=options.never,
    )
    driver = Driver(alone, prefix_cache=False)
    driver.submit(request)
    driver.run()
    return driver.outputs(request.request_id)


def greedy_outputs(prompt_ids: Items[int], max_tokens: int, options: EchoOptions) -> list[int]:
    """The same for greedy decoding of one sequence, from the echo function itself."""
    request = greedy_request("solo", prompt_ids, max_tokens)
    return list(EchoExecutor(options).greedy(request.prompt_ids, request.max_tokens))

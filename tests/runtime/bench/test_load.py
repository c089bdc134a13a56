"""The load generator: what it sends, when, and what it makes of the answers."""

import asyncio
import gc
import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.aio import asynchronous
from tests.support.servers import EOS, EchoEngine, echo_server, open_echo
from trtc.protos.errors import QueueFullError
from trtc.runtime.bench.load import ServerTarget, Shape, local_target, run_load
from trtc.runtime.bench.measure import Load, SchedulerCost, Spread, Trace, measure
from trtc.runtime.client import AsyncClient
from trtc.runtime.engine.config import EngineConfig
from trtc.runtime.engine.loop import LoopStats
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.requests.model_info import ModelInfo
from trtc.runtime.requests.request import Output
from trtc.runtime.requests.request_input import RequestInput


def test_a_traces_times() -> None:
    trace = Trace(sent_at=1.0, arrivals=[(1.5, 1), (1.6, 2), (1.9, 1)])
    assert trace.num_tokens == 4
    assert trace.first_token_s == pytest.approx(0.5)
    assert trace.whole_s == pytest.approx(0.9)
    assert trace.between_tokens_s == pytest.approx([0.05, 0.05, 0.3])


def test_percentiles_are_in_milliseconds() -> None:
    spread = Spread.of_seconds([number / 1000 for number in range(101)])
    assert (spread.mean, spread.p50, spread.p95, spread.p99) == pytest.approx((50, 50, 95, 99))
    assert Spread.of_seconds([]) == Spread(0.0, 0.0, 0.0, 0.0)


def test_failures_are_counted_and_left_out_of_the_times() -> None:
    traces = [
        Trace(0.0, [(0.1, 1), (0.2, 1)]),
        Trace(0.0, [(5.0, 1)], failure="UnavailableError"),
        Trace(0.0, failure="QueueFullError"),
        Trace(0.0, failure="QueueFullError"),
    ]
    found = measure(Load(4, concurrency=2), traces, seconds=2.0)
    assert (found.completed, found.output_tokens) == (1, 2)
    assert found.failures == {"UnavailableError": 1, "QueueFullError": 2}
    assert (found.output_tokens_per_s, found.requests_per_s) == (1.0, 0.5)
    assert found.ttft_ms.p99 == pytest.approx(100)
    document = found.as_json()
    assert document["concurrency"] == 2
    assert document["rate"] is None


def test_the_schedulers_cost_is_the_work_beside_the_steps() -> None:
    before = LoopStats(steps=2, step_seconds=1.0, work_seconds=1.1)
    after = LoopStats(steps=12, step_seconds=2.0, work_seconds=2.3)
    found = SchedulerCost.between(before, after)
    assert (found.ms_a_step, found.share) == pytest.approx((20.0, 0.2 / 1.2))
    assert SchedulerCost.between(before, before) == SchedulerCost(0.0, 0.0)


class Recorder:
    """A target that answers after `seconds` and writes down what it was sent, and when."""

    def __init__(self, seconds: float, fail_every: int = 0) -> None:
        self._seconds = seconds
        self._fail_every = fail_every
        self.sent_at: list[float] = []
        self.prompts: list[tuple[int, ...]] = []
        self.most_at_once = 0
        self._now = 0

    async def info(self) -> ModelInfo:
        return ModelInfo(
            name="fake", family="", scheme="", kv_dtype="", target="", vocab_size=100,
            max_seq_len=64, max_batch_size=8, max_num_tokens=64, has_tokenizer=False,
            has_chat_template=False, eos_token_ids=(), page_size=16, num_pages=16,
            engine_digest="", trtc_version="",
        )  # fmt: skip

    async def stream(self, request_input: RequestInput) -> AsyncIterator[Output]:
        assert request_input.token_ids is not None
        self.sent_at.append(time.perf_counter())
        self.prompts.append(request_input.token_ids)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        await asyncio.sleep(self._seconds)
        self._now -= 1
        if self._fail_every and len(self.sent_at) % self._fail_every == 0:
            raise QueueFullError("full")
        yield Output("r", 0, (1,) * (request_input.max_tokens or 0), "")

    def stats(self) -> None:
        return None


@asynchronous
async def test_the_closed_loop_keeps_its_concurrency() -> None:
    target = Recorder(0.01)
    found = await run_load(target, Load(20, concurrency=4), Shape(10, 3))
    assert target.most_at_once == 4
    assert found.completed == 20
    assert found.seconds >= 5 * 0.01


@asynchronous
async def test_the_open_loop_does_not_wait_for_answers() -> None:
    target = Recorder(0.3)
    found = await run_load(target, Load(40, rate=400.0), Shape(10, 3))
    assert target.most_at_once > 20, "answers take longer than all arrivals together"
    assert found.completed == 40
    gaps = [after - before for before, after in itertools.pairwise(target.sent_at)]
    assert max(gaps) > 2 * min(gaps), "Poisson arrivals are not evenly spaced"


@asynchronous
async def test_prompts_are_random_and_repeatable() -> None:
    first, again, other = Recorder(0.0), Recorder(0.0), Recorder(0.0)
    await run_load(first, Load(5, concurrency=1), Shape(10, 3, seed=1))
    await run_load(again, Load(5, concurrency=1), Shape(10, 3, seed=1))
    await run_load(other, Load(5, concurrency=1), Shape(10, 3, seed=2))
    assert first.prompts == again.prompts
    assert first.prompts != other.prompts
    assert len(set(first.prompts)) == 5
    assert all(len(prompt) == 10 and max(prompt) < 100 for prompt in first.prompts)


@asynchronous
async def test_errors_do_not_end_the_load() -> None:
    found = await run_load(Recorder(0.0, fail_every=3), Load(9, concurrency=1), Shape(4, 2))
    assert found.completed == 6
    assert found.failures == {"QueueFullError": 3}


ECHO = EchoEngine(EchoOptions(never=(EOS,)))


@asynchronous
async def test_an_engine_in_this_process_and_one_behind_a_server(tmp_path: Path) -> None:
    load, shape = Load(6, concurrency=3), Shape(12, 5)
    async with local_target(
        tmp_path,
        EngineConfig(),
        lambda source, config: open_echo(ECHO, source.name, config),
    ) as local:
        found = await run_load(local, load, shape)
        stats = local.stats()
        assert gc.get_freeze_count() > 0, "no garbage collection visits all of the engine"
    assert gc.get_freeze_count() == 0
    assert (found.completed, found.output_tokens) == (6, 30)
    assert stats.work_seconds > stats.step_seconds > 0
    assert found.scheduler is not None and found.scheduler.ms_a_step > 0
    assert 0 < found.scheduler.share < 1
    async with echo_server(ECHO) as server, AsyncClient(server.address) as client:
        found = await run_load(ServerTarget(client, ""), load, shape)
        assert (found.completed, found.output_tokens) == (6, 30)
        assert found.scheduler is None

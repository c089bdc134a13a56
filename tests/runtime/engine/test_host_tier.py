"""The tier of the prefix cache in the host's memory, through the loop; test_scheduler.py's machine
drives it beside everything else."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.support.driver import greedy_outputs
from tests.support.lazy import LazyEcho, LazyRead
from tests.support.loops import Loop, running_loop
from tests.support.requests import greedy_request
from trtc.protos.errors import EnvironmentFault, RequestError, UnsupportedError
from trtc.runtime.engine import host_tier
from trtc.runtime.engine.host_tier import HostTier
from trtc.runtime.engine.loop import LoopConfig
from trtc.runtime.executors.base import Bytes, PageRead, PendingStep, StepBatch
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.requests.request import Usage
from trtc.runtime.sampling.sampler import SamplingBatch

OPTIONS = EchoOptions(
    vocab_size=64, num_pages=12, page_size=4, max_batch_size=4, max_seq_len=48, max_num_tokens=16
)
PAGE_BYTES = EchoExecutor(OPTIONS).kv.page_bytes
PROMPTS = [[number] * 30 for number in range(1, 5)]
"""Of 7 whole pages and a part: one of them and its output fill most of the pool."""


@contextmanager
def tiered(num_pages: int, *, ahead: bool = False) -> Iterator[Loop]:
    config = LoopConfig(kv_host_bytes=num_pages * PAGE_BYTES)
    with running_loop(OPTIONS, config, ahead=ahead) as loop:
        yield loop


def ask(loop: Loop, number: int, attempt: str = "", salt: str = "") -> Usage:
    """Usage of a prompt's request, whose tokens must be right."""
    prompt = PROMPTS[number]
    request = greedy_request(f"{number}{attempt}{salt}", prompt, 6, cache_salt=salt)
    result = loop.send(request).result()
    assert list(result.completions[0].token_ids) == greedy_outputs(prompt, 6, OPTIONS)
    return result.usage


@pytest.mark.parametrize("ahead", [False, True])
def test_evicted_prefixes_come_back(ahead: bool) -> None:
    with tiered(100, ahead=ahead) as loop:
        assert [ask(loop, number).cached_prompt_tokens for number in range(4)] == [0] * 4
        assert loop.stats().host_hit_tokens == 0
        again = [ask(loop, number, "again").cached_prompt_tokens for number in range(4)]
        assert again == [28] * 4
        stats = loop.stats()
        assert stats.host_hit_tokens >= 3 * 16
        assert stats.host_restored_bytes == stats.host_hit_tokens // 4 * PAGE_BYTES
        assert stats.host_pages_used * PAGE_BYTES == stats.host_saved_bytes
    with running_loop(OPTIONS, ahead=ahead) as loop:
        for number in range(4):
            ask(loop, number)
        assert ask(loop, 0, "again").cached_prompt_tokens < 28


def test_what_comes_back_is_not_copied_again_when_it_leaves() -> None:
    with tiered(100) as loop:
        for attempt in range(3):
            for number in range(4):
                ask(loop, number, str(attempt))
            if attempt == 1:
                saved = loop.stats().host_saved_bytes
        assert loop.stats().host_saved_bytes == saved
        assert loop.stats().host_restored_bytes > 0


class _Watched(EchoExecutor):
    """Notes how many pages are written before each step, and how many sequences the step has."""

    def __init__(self, options: EchoOptions) -> None:
        super().__init__(options)
        self.steps: list[tuple[int, int]] = []
        self.num_written = 0

    def write_pages(self, pages: Sequence[int], data: Bytes) -> None:
        self.num_written += len(pages)
        super().write_pages(pages, data)

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> PendingStep:
        self.steps.append((self.num_written, len(batch.context_lens)))
        self.num_written = 0
        return super().launch(batch, sampling)


def test_others_compute_while_a_long_prefix_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time for more than one copy of 2 pages a step."""
    monkeypatch.setattr(host_tier, "_BATCH_BYTES", 2 * PAGE_BYTES)
    executor = _Watched(replace(OPTIONS, num_pages=24))
    config = LoopConfig(kv_host_bytes=100 * PAGE_BYTES, step_target_s=1e-9)
    with running_loop(OPTIONS, config, executor=executor) as loop:
        for number in range(4):
            ask(loop, number)
        long = loop.send(greedy_request("long", [9] * 3, 40, ignore_eos=True))
        long.first.wait()
        before = len(executor.steps)
        assert ask(loop, 0, "again").cached_prompt_tokens == 28
        steps = executor.steps[before:]
        long.wait()
        assert loop.stats().host_restored_bytes > 0
    assert [steps[at] for at in range(len(steps)) if steps[at][0]] == [
        (2, 1),
        (2, 1),
        (2, 1),
        (1, 2),
    ]


def test_a_salt_keeps_what_left_the_pool_apart_as_well() -> None:
    with tiered(100) as loop:
        for number in range(4):
            ask(loop, number, salt="ours")
        assert loop.stats().host_saved_bytes > 0
        assert ask(loop, 0, salt="theirs").cached_prompt_tokens == 0
        assert ask(loop, 0).cached_prompt_tokens == 0
        assert ask(loop, 0, "again", salt="ours").cached_prompt_tokens == 28


def test_the_least_recently_used_pages_make_room() -> None:
    """8 pages of a prompt and its output fit, and those of the next one take their place."""
    with tiered(8) as loop:
        for number in range(4):
            ask(loop, number)
        stats = loop.stats()
        assert (stats.host_pages_used, stats.host_pages_total) == (8, 8)
        assert stats.host_saved_bytes > 8 * PAGE_BYTES
        assert ask(loop, 0, "again").cached_prompt_tokens == 0


def test_a_scored_prompt_takes_nothing_from_the_tier() -> None:
    with tiered(100) as loop:
        for number in range(4):
            ask(loop, number)
        request = greedy_request("scored", PROMPTS[0], 2, prompt_logprobs=0)
        assert loop.send(request).result().usage.cached_prompt_tokens == 0
        assert loop.stats().host_restored_bytes == 0


class _InParts(EchoExecutor):
    moves_pages = False  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("executor", "num_bytes", "error", "message"),
    [
        (EchoExecutor(OPTIONS), PAGE_BYTES - 1, RequestError, "holds no page of 128 bytes"),
        (EchoExecutor(OPTIONS), 1 << 60, EnvironmentFault, "of memory that are free. Give less"),
        (_InParts(OPTIONS), 1 << 20, UnsupportedError, "several ranks"),
    ],
)
def test_a_tier_that_cannot_be_is_refused(
    executor: EchoExecutor, num_bytes: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=rf"kv_host_bytes: .*{message}"):
        Loop(executor, None, LoopConfig(kv_host_bytes=num_bytes))


def test_a_tier_needs_a_prefix_cache() -> None:
    config = LoopConfig(kv_host_bytes=1 << 20, prefix_cache=False)
    with pytest.raises(RequestError, match=r"kv_host_bytes: .*prefix cache"):
        Loop(EchoExecutor(OPTIONS), None, config)


class _Counting(LazyEcho):
    """Counts pages that were read and have not been waited for, which a stream would keep."""

    def __init__(self, options: EchoOptions) -> None:
        super().__init__(options)
        self.reads: list[LazyRead] = []
        self.most = 0

    def read_pages(self, pages: Sequence[int]) -> PageRead:
        read = super().read_pages(pages)
        assert isinstance(read, LazyRead)
        self.reads.append(read)
        under_way = sum(len(one.pages) for one in self.reads if one.data is None)
        self.most = max(self.most, under_way)
        return read


def test_many_pages_are_copied_a_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are evicted, and none that are on their way back are dropped for them."""
    monkeypatch.setattr(host_tier, "_BATCH_BYTES", 2 * PAGE_BYTES)
    executor = _Counting(replace(OPTIONS, num_pages=60))
    tier = HostTier(executor, 30 * PAGE_BYTES)
    executor._tokens[:] = range(240)
    for page in range(30):
        tier.evicted(b"old", page, page)
    tier.flush()
    assert executor.most <= 10
    for page in range(30, 60):
        tier.evicted(b"new", page, page)
    kept = [(b"old", group) for group in range(5, 25)]
    tier.take(kept).write(0, range(40, 60))
    tier.land(tier.num_begun)
    executor.run_until(lambda: not executor._stream)
    assert executor._tokens[160:240].tolist() == list(range(20, 100))
    assert [tier.has(*name) for name in kept] == [True] * 20
    assert [group for group in range(60) if tier.has(b"new", group)] == list(range(50, 60))
    read = tier.take([(b"new", 59)])
    read.write(0, [0])
    executor.run_until(lambda: not executor._stream)
    assert executor._tokens[:4].tolist() == list(range(236, 240))


def test_a_page_that_is_wanted_before_it_has_landed_is_waited_for() -> None:
    executor = EchoExecutor(OPTIONS)
    tier = HostTier(executor, 2 * PAGE_BYTES)
    executor._tokens[:8] = range(8)
    tier.evicted(b"one", 0, 0)
    tier.flush()
    tier.evicted(b"two", 0, 1)
    tier.flush()
    executor._tokens[:] = 0
    assert not tier.has(b"one", 1)
    tier.take([(b"two", 0)]).write(0, [2])
    tier.take([(b"one", 0)]).write(0, [3])
    assert executor._tokens[8:16].tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    tier.evicted(b"three", 0, 2)
    tier.flush()
    assert [tier.has(key, 0) for key in (b"one", b"two", b"three")] == [True, False, True]

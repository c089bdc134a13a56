"""runtime/executors/ranks: several processes are one executor, or fail as one."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as with_fields

from tests.support.loops import Loop
from tests.support.masks import SomeTokens
from tests.support.rank_worker import (
    SHORT,
    LocalEcho,
    Role,
    command,
    group_of,
    open_echo_ranks,
)
from tests.support.requests import greedy_request, sampled_request
from trtc.protos.errors import (
    EngineCorruptError,
    EnvironmentFault,
    TrtcError,
    UnavailableError,
    UnsupportedError,
)
from trtc.protos.sampling import SamplingParams
from trtc.runtime.engine.drafting import DraftConfig
from trtc.runtime.engine.loop import LoopConfig
from trtc.runtime.executors.base import DraftRows, StepBatch
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.executors.ranks.executor import ShardedExecutor
from trtc.runtime.executors.ranks.group import Patience, RankGroup
from trtc.runtime.executors.ranks.messages import Progress, digest, pack, unpack
from trtc.runtime.executors.ranks.progress import StepBook
from trtc.runtime.requests.request import GenerationRequest
from trtc.runtime.sampling.masks import RowMasks
from trtc.runtime.sampling.sampler import SampledTokens, SamplingBatch, SparseRows, TokenCounts

SLOW = EchoOptions(step_s=0.02)


@contextmanager
def sharded(
    *roles: Role, patience: Patience = SHORT, local: LocalEcho | None = None
) -> Iterator[ShardedExecutor]:
    options = roles[0].options
    with group_of(*roles, patience=patience) as group:
        executor = open_echo_ranks(group, lambda: local or LocalEcho(options))
        try:
            yield executor
        finally:
            executor.close()


@contextmanager
def running(executor: Any, config: LoopConfig | None = None) -> Iterator[Loop]:
    loop = Loop(executor, None, config or LoopConfig())
    loop.start()
    try:
        yield loop
    finally:
        loop.stop()


def ends_within(seconds: float, loop: Loop) -> float:
    """Seconds until the loop is dead."""
    began = time.monotonic()
    while loop.healthy() and time.monotonic() - began < seconds:
        time.sleep(0.01)
    assert not loop.healthy()
    return time.monotonic() - began


# --- What all ranks do --------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_answer_as_one(ranks: int) -> None:
    """Run ahead, forked, preempted and drawn: every rank draws what rank 0 does, step by step."""
    options = EchoOptions(num_pages=24, page_size=4, max_batch_size=8, max_num_tokens=32)
    random.seed(3)
    requests = [greedy_request(f"g{i}", [i, 7, 9], random.randint(1, 30)) for i in range(12)] + [
        sampled_request(f"s{i}", [i] * 9, 20, seed=i, n=1 + i % 3) for i in range(8)
    ]
    found = []
    with sharded(*[Role(options)] * (ranks - 1)) as executor, running(executor) as loop:
        inboxes = [loop.send(request) for request in requests]
        found = [inbox.result() for inbox in inboxes]
        assert loop.stats().preemptions > 0
        assert loop.healthy()
    with running(EchoExecutor(options)) as loop:
        expected = [loop.send(request).result() for request in requests]
    for one, other in zip(found, expected, strict=True):
        assert [c.token_ids for c in one.completions] == [c.token_ids for c in other.completions]


def test_all_ranks_draw_late_under_masks_and_count_pending_tokens() -> None:
    options = EchoOptions(vocab_size=64, num_pages=40, page_size=4, max_batch_size=6)
    penalised = SamplingParams(temperature=0.7, frequency_penalty=0.9, seed=1)
    requests = [
        *(
            sampled_request(f"m{i}", [i] * 4, 12, seed=i, n=1 + i % 2, masks=SomeTokens(64, i))
            for i in range(4)
        ),
        *(GenerationRequest(f"p{i}", (i,), penalised, max_tokens=20) for i in range(4)),
        greedy_request("plain", [9], 30, logprobs=2),
    ]
    ahead = replace(options, counts_pending=True)
    local = LocalEcho(ahead)
    with sharded(*[Role(ahead)] * 2, local=local) as executor, running(executor) as loop:
        found = [inbox.result() for inbox in [loop.send(request) for request in requests]]
        assert loop.healthy()
    assert min(local.num_drawn_late, local.num_counted) > 10
    with running(EchoExecutor(options)) as loop:
        expected = [loop.send(request).result() for request in requests]
    for one, other in zip(found, expected, strict=True):
        assert [c.token_ids for c in one.completions] == [c.token_ids for c in other.completions]


def test_several_ranks_check_drafts_as_one() -> None:
    """Three tokens that mean different things by all that was before: most drafts are wrong."""
    draft_rows = DraftRows(most=16, as_sequences=True)
    options = EchoOptions(vocab_size=3, num_pages=40, page_size=4, draft_rows=draft_rows)
    requests = [greedy_request(f"r{number}", [number % 3], 60) for number in range(4)]
    config = LoopConfig(drafts=DraftConfig())
    with sharded(Role(options)) as executor, running(executor, config) as loop:
        inboxes = [loop.send(request) for request in requests]
        for request, inbox in zip(requests, inboxes, strict=True):
            (told,) = inbox.result().completions
            assert told.token_ids == EchoExecutor(options).greedy(request.prompt_ids, 60)
        stats = loop.stats()
    assert stats.draft_tokens > stats.accepted_draft_tokens > 0


def test_logits_are_computed_by_all_ranks() -> None:
    batch = StepBatch(
        token_ids=np.array([3, 4, 5], np.int32),
        positions=np.arange(3, dtype=np.int32),
        slots=np.arange(3, dtype=np.int32),
        query_start=np.array([0, 3], np.int32),
        context_lens=np.array([3], np.int32),
        page_table=np.zeros((1, 1), np.int32),
        logit_rows=np.arange(3, dtype=np.int32),
    )
    options = EchoOptions()
    with sharded(Role(options), Role(options)) as executor:
        np.testing.assert_array_equal(executor.logits(batch), EchoExecutor(options).logits(batch))
        tokens = executor.launch(batch, SamplingBatch.greedy(3)).wait()
        time.sleep(0.5)
        executor.check()
    np.testing.assert_array_equal(
        tokens.token_ids, EchoExecutor(options).logits(batch).argmax(axis=1)
    )


def test_pages_in_parts_are_not_moved() -> None:
    with sharded(Role(EchoOptions())) as executor:
        assert not executor.moves_pages
        with pytest.raises(UnsupportedError, match="several ranks"):
            executor.read_pages([0])
        with pytest.raises(UnsupportedError, match="one GPU"):
            executor.write_pages([0], np.zeros((1, executor.kv.page_bytes), np.uint8))


def test_a_closed_group_is_closed_for_good() -> None:
    with sharded(Role()) as executor:
        executor.close()
        executor.close()
        for pid in executor.pids:
            assert not Path(f"/proc/{pid}").exists()


def test_ranks_leave_signals_to_the_first() -> None:
    """Ctrl-C reaches every process of a terminal; the server then lets requests end first."""
    with sharded(Role(SLOW)) as executor, running(executor) as loop:
        inbox = loop.send(greedy_request("r", [1], 30))
        assert inbox.first.wait(10)
        for pid in executor.pids:
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        assert len(inbox.result().token_ids) == 30


# --- A rank that ends, hangs or goes astray -----------------------------------------------------


def test_a_killed_rank_ends_every_request_with_one_error() -> None:
    with sharded(*[Role(SLOW)] * 2) as executor, running(executor) as loop:
        inboxes = [loop.send(greedy_request(f"r{i}", [i], 1000)) for i in range(20)]
        assert all(inbox.first.wait(10) for inbox in inboxes)
        began = time.monotonic()
        os.kill(executor.pids[1], signal.SIGKILL)
        for inbox in inboxes:
            assert isinstance(inbox.wait().error, UnavailableError)
            assert "rank 2 of 3 was ended by signal 9" in str(inbox.error)
        assert time.monotonic() - began < 15
        assert not loop.healthy()
        with pytest.raises(UnavailableError, match="rank 2 of 3"):
            loop.send(greedy_request("late", [1], 4))
        with pytest.raises(EnvironmentFault, match="rank 2 of 3"):
            executor.check()


def test_a_rank_that_ends_while_nothing_runs_is_noticed_too() -> None:
    with sharded(Role()) as executor, running(executor) as loop:
        loop.send(greedy_request("r", [1], 4)).result()
        os.kill(executor.pids[0], signal.SIGKILL)
        ends_within(20, loop)


def test_a_rank_that_stops_is_given_up() -> None:
    with sharded(*[Role(SLOW)] * 2) as executor, running(executor) as loop:
        inbox = loop.send(greedy_request("r", [1], 1000))
        assert inbox.first.wait(10)
        time.sleep(0.5)  # progress is told now and then
        began = time.monotonic()
        os.kill(executor.pids[0], signal.SIGSTOP)
        error = str(inbox.wait().error)
        assert re.search(r"step \d+ has not (begun|ended) on rank 1 within 5 s", error)
        assert time.monotonic() - began < SHORT.step + 15


def test_a_device_that_fails_on_another_rank_says_so() -> None:
    with sharded(Role(SLOW), Role(SLOW, "device fails")) as executor, running(executor) as loop:
        error = str(loop.send(greedy_request("r", [1], 1000)).wait().error)
    assert "rank 2 of 3: the echo device was asked to fail" in error or (
        "rank 2 of 3: fail_at_step: the echo device" in error
    )


def test_ranks_that_draw_other_tokens_are_not_believed() -> None:
    """A rank whose logits differ would fill its pool with keys of other tokens, unseen."""
    astray = replace(SLOW, never=tuple(range(0, 512, 2)))
    with sharded(Role(SLOW), Role(astray)) as executor, running(executor) as loop:
        error = str(loop.send(greedy_request("r", [1], 1000)).wait().error)
    assert "rank 2 has drawn other tokens than rank 0" in error


class Stuck(LocalEcho):
    """A device that waits for a rank that is gone, until it is abandoned, or for ever."""

    def __init__(self, options: EchoOptions, *, lets_go: bool) -> None:
        super().__init__(options)
        self.stuck = threading.Event()
        self.freed = threading.Event()
        self._lets_go = lets_go

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> Any:
        self.stuck.set()
        self.freed.wait()
        raise EnvironmentFault("the GPU was abandoned")

    def abandon(self) -> None:
        super().abandon()
        if self._lets_go:
            self.freed.set()


def test_who_waits_for_the_device_is_let_go_and_told_the_cause() -> None:
    local = Stuck(SLOW, lets_go=True)
    with sharded(Role(SLOW), local=local) as executor, running(executor) as loop:
        inbox = loop.send(greedy_request("r", [1], 10))
        assert local.stuck.wait(10)
        os.kill(executor.pids[0], signal.SIGKILL)
        error = inbox.wait().error
    assert "rank 1 of 2 was ended by signal 9" in str(error)
    assert "abandoned" not in str(error)
    assert local.abandoned.is_set() and not local.closed


def test_a_device_that_never_lets_go_is_the_end_of_the_process() -> None:
    called: list[TrtcError] = []
    local = Stuck(SLOW, lets_go=False)

    def last_resort(error: TrtcError) -> None:
        called.append(error)
        local.freed.set()

    patience = replace(SHORT, last_resort=last_resort)
    with (
        sharded(Role(SLOW), local=local, patience=patience) as executor,
        running(executor) as loop,
    ):
        inbox = loop.send(greedy_request("r", [1], 10))
        assert local.stuck.wait(10)
        os.kill(executor.pids[0], signal.SIGKILL)
        assert "signal 9" in str(inbox.wait().error)
    assert len(called) == 1 and "rank 1 of 2" in str(called[0])


def test_a_device_of_rank_0_that_hangs_is_noticed() -> None:
    local = Stuck(SLOW, lets_go=True)
    with sharded(Role(SLOW), local=local) as executor, running(executor) as loop:
        error = str(loop.send(greedy_request("r", [1], 10)).wait().error)
    assert "within 5 s" in error


# --- The start ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("corrupt", EngineCorruptError, r"weights\.rank2: rank 2 of 3: is torn"),
        ("bug", EnvironmentFault, "rank 2 of 3: KeyError: 'a bug'"),
        ("slow opening", EnvironmentFault, "the ranks have not met within 3 s"),
    ],
)
def test_a_rank_that_cannot_open_reports_its_own_error(
    fault: str, error: type[TrtcError], message: str
) -> None:
    patience = replace(SHORT, open=3.0)
    with group_of(Role(), Role(fault=fault), patience=patience) as group:
        began = time.monotonic()
        with pytest.raises(error, match=message):
            open_echo_ranks(group, lambda: LocalEcho(EchoOptions()))
        assert time.monotonic() - began < 20


def test_a_rank_without_its_device_says_so_before_anything_is_loaded() -> None:
    with (
        group_of(Role(fault="no device"), Role()) as group,
        pytest.raises(EnvironmentFault) as caught,
    ):
        group.free_bytes()
    assert str(caught.value) == "GPU 1: rank 1 of 3: there is no GPU 1. Plug one in"


def test_ranks_tell_their_memory() -> None:
    with group_of(Role(), Role()) as group:
        assert group.free_bytes() == (1 << 30, 1 << 30)


def test_rank_0_that_waits_for_one_that_is_gone_is_not_waited_for() -> None:
    gate = threading.Event()

    def local() -> LocalEcho:
        gate.wait()
        return LocalEcho(EchoOptions())

    with (
        group_of(Role(fault="corrupt")) as group,
        pytest.raises(EngineCorruptError, match="is torn"),
    ):
        open_echo_ranks(group, local)
    gate.set()


def test_an_error_of_rank_0_is_told_as_it_is() -> None:
    def local() -> LocalEcho:
        raise EnvironmentFault("too little memory", field="GPU memory")

    began = time.monotonic()
    with (
        group_of(Role(fault="slow opening")) as group,
        pytest.raises(EnvironmentFault, match="GPU memory: too little memory"),
    ):
        open_echo_ranks(group, local)
    assert time.monotonic() - began < 20, "the others wait for nobody"


@pytest.mark.parametrize("program", [["false"], ["sh", "-c", "kill -9 $$"]])
def test_a_process_that_ends_at_once(program: list[str]) -> None:
    group = RankGroup([program], SHORT)
    try:
        with pytest.raises(EnvironmentFault, match=r"rank 1 of 2 (ended, status 1|.*signal 9)"):
            group.free_bytes()
    finally:
        group.close()


def test_a_program_that_is_not_there_leaves_no_others() -> None:
    with pytest.raises(EnvironmentFault, match="rank 2 cannot be started"):
        RankGroup([command(Role()), ["/nowhere/python"]], SHORT)


ORPHANS = """
import sys, time
from tests.support.rank_worker import *
group = RankGroup([command(Role())] * 2, SHORT)
executor = open_echo_ranks(group, lambda: LocalEcho(EchoOptions()))
print(*group.pids, flush=True)
time.sleep(60)
"""


def test_ranks_do_not_outlive_a_killed_server() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


# --- Messages and progress ----------------------------------------------------------------------


def equal_records(left: Any, right: Any) -> bool:
    names = left.__struct_fields__
    return all(equal(getattr(left, name), getattr(right, name)) for name in names)


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, SparseRows | RowMasks) and right is not None:
        return equal_records(left, right)
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())


@pytest.mark.parametrize("sources", [None, np.array([-1, 2], np.int32)])
def test_steps_come_back_from_their_messages(sources: Any) -> None:
    batch = StepBatch(
        token_ids=np.array([5, 6], np.int32),
        positions=np.array([0, 9], np.int32),
        slots=np.array([7, 8], np.int32),
        query_start=np.array([0, 1, 2], np.int32),
        context_lens=np.array([1, 10], np.int32),
        page_table=np.arange(6, dtype=np.int32).reshape(2, 3)[:, :2],
        logit_rows=np.array([], np.int32),
        token_sources=sources,
    )
    again = unpack(StepBatch, pack(batch))
    assert equal_records(batch, again)
    sampling = SamplingBatch.of(
        [SamplingParams(temperature=0.5, logit_bias={3: 1.5}, seed=2**63), SamplingParams()],
        counts={1: TokenCounts(np.array([4], np.int32), np.array([2], np.int32))},
        num_logprobs=[None, 3],
    )
    words = np.array([[7, 2**31 + 5]], np.uint32)
    sampling = with_fields(
        sampling,
        pending=np.array([-1, 4], np.int32),
        masks=None if sources is None else RowMasks(np.array([1], np.int32), words),
    )
    back = unpack(SamplingBatch, pack(sampling))
    assert equal_records(sampling, back)


def test_a_digest_covers_all_tokens_in_order_but_those_of_invalid_rows() -> None:
    def drawn(*token_ids: int, invalid: tuple[int, ...] = ()) -> SampledTokens:
        return SampledTokens(np.array(token_ids, np.int32), invalid_rows=invalid)

    assert digest(drawn(1, 2), 0) == digest(drawn(1, 2), 0) != digest(drawn(2, 1), 0)
    assert digest(drawn(1), digest(drawn(2), 0)) != digest(drawn(2), digest(drawn(1), 0))
    assert digest(drawn(1, 5, invalid=(1,)), 0) == digest(drawn(1, 9, invalid=(1,)), 0)


def test_the_book_knows_who_is_late() -> None:
    book = StepBook(2)
    book.begin(1, 10.0)
    book.begin(2, 11.0)
    assert book.overdue(10.0) == ""
    assert book.overdue(10.5) == "step 1 has not begun on rank 1 and 2"
    assert not book.report(1, Progress(begun=2, ended=0, digest=0))
    assert book.overdue(10.5) == "step 1 has not begun on rank 2"
    assert not book.report(2, Progress(begun=1, ended=0, digest=0))
    assert book.overdue(10.5) == "step 1 has not ended on rank 1 and 2"
    assert not book.report(1, Progress(begun=2, ended=2, digest=7))
    assert book.overdue(10.5) == "step 1 has not ended on rank 2"
    assert not book.report(2, Progress(begun=2, ended=1, digest=5))
    assert book.overdue(10.5) == ""
    assert book.overdue(11.5) == "step 2 has not ended on rank 2"


@pytest.mark.parametrize("rank_0_is_first", [True, False])
def test_the_book_compares_whoever_is_first(rank_0_is_first: bool) -> None:
    for other, problem in ((5, ""), (6, "rank 2 has drawn other tokens than rank 0, up to step 1")):
        book = StepBook(2)
        book.begin(1, 0.0)
        first = Progress(begun=1, ended=1, digest=5)
        told = [lambda book=book: book.end(1, 5)]
        told.append(lambda book=book, other=other: book.report(2, Progress(1, 1, other)))  # type: ignore[misc]
        found = [one() for one in (told if rank_0_is_first else reversed(told))]
        assert found == ["", problem]
        assert book.report(1, first) == ""


def test_the_book_forgets_what_all_have_ended() -> None:
    book = StepBook(2)
    for number in range(1, 1001):
        book.begin(number, 0.0)
        book.end(number, number)
        for rank in (1, 2):
            book.report(rank, Progress(begun=number, ended=number, digest=number))
    assert len(book._begun) == 0 and len(book._digests) == 1

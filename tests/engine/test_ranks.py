"""A sharded model on several processes, each with its own weights and pool, led by one loop."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.caches import kv_heads
from tests.support.evaluated_ranks import NUM_PAGES, EvaluatedExecutor, command, kind_of
from tests.support.loops import Loop
from tests.support.mesh import Mesh
from tests.support.requests import greedy_request, sampled_request
from trtc.protos.errors import UnavailableError
from trtc.runtime.engine.loop import LoopConfig
from trtc.runtime.executors.ranks.executor import ShardedExecutor, open_ranks
from trtc.runtime.executors.ranks.group import Patience, RankGroup


@contextmanager
def sharded(scheme: str, ranks: int, directory: Path) -> Iterator[ShardedExecutor]:
    def local() -> EvaluatedExecutor:
        return EvaluatedExecutor(kind_of(scheme), 0, ranks, Mesh(directory, 0, ranks))

    commands = [command(scheme, rank, ranks) for rank in range(1, ranks)]
    group = RankGroup(commands, Patience(open=120.0, step=20.0))
    try:
        executor = open_ranks(
            group,
            engine=directory,
            num_pages=NUM_PAGES,
            dummy_weights=False,
            rendezvous=str(directory).encode(),
            local=local,
        )
        yield executor
        executor.close()
    finally:
        group.close()


@contextmanager
def running(executor: Any) -> Iterator[Loop]:
    loop = Loop(executor, None, LoopConfig())
    loop.start()
    try:
        yield loop
    finally:
        loop.stop()


@pytest.mark.parametrize("scheme", ["fp32", "int8_sq"])
def test_two_processes_give_the_tokens_of_one(scheme: str, tmp_path: Path) -> None:
    """Greedy and drawn, chunked prefill, prefix reuse and a fork's copied page."""
    requests = [
        greedy_request("a", range(1, 19), 8),
        greedy_request("b", [*range(1, 19), 5], 6),
        sampled_request("c", [3, 1, 4], 6, seed=9, n=2),
    ]
    with running(EvaluatedExecutor(kind_of(scheme))) as loop:
        expected = [loop.send(request).result() for request in requests]
    with sharded(scheme, 2, tmp_path) as executor, running(executor) as loop:
        assert kv_heads(executor.kv) == {1}
        found = [loop.send(request).result() for request in requests]
    for one, other in zip(found, expected, strict=True):
        assert [c.token_ids for c in one.completions] == [c.token_ids for c in other.completions]


def test_a_rank_killed_inside_a_collective_ends_all_with_its_name(tmp_path: Path) -> None:
    with sharded("fp32", 2, tmp_path) as executor, running(executor) as loop:
        inbox = loop.send(greedy_request("r", [1, 2, 3], 50))
        assert inbox.first.wait(30)
        began = time.monotonic()
        os.kill(executor.pids[0], signal.SIGKILL)
        error = inbox.wait().error
        assert isinstance(error, UnavailableError)
        assert "rank 1 of 2 was ended by signal 9" in str(error)
        assert time.monotonic() - began < 5

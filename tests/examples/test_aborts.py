"""Requests that are left, as examples/bench/aborts.py leaves them: nothing of them stays."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from examples.bench import aborts
from examples.bench.served import trtc_server
from tests.support.engines import build_tiny
from tests.support.servers import TOKENIZER

IDLE = aborts.Reading(rss=1 << 28, num_fds=20, num_pages=0, num_sequences=0)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (replace(IDLE, num_fds=19, rss=IDLE.rss + (31 << 20)), []),
        (replace(IDLE, num_pages=2), ["2 KV pages and 0 sequences are held"]),
        (replace(IDLE, num_sequences=1), ["0 KV pages and 1 sequences are held"]),
        (replace(IDLE, num_fds=22), []),
        (replace(IDLE, num_fds=23), ["3 more file descriptors are open"]),
        (replace(IDLE, rss=1 << 29), ["memory grew from 268,435,456 to 536,870,912 bytes"]),
    ],
)
def test_what_stayed_is_said(after: aborts.Reading, said: list[str]) -> None:
    assert aborts.problems(IDLE, after) == said


def test_a_server_whose_clients_leave_holds_nothing(tmp_path: Path) -> None:
    engine = tmp_path / "pyllama"
    build_tiny(TOKENIZER, engine, "bf16", max_seq_len=256, max_batch_size=8, max_num_tokens=64)
    with trtc_server(engine, "--threads", "1", "--kv-bytes", "16000000") as served:
        before, after, wrong = asyncio.run(aborts.run(served, 300, seed=0))
    assert wrong == [], (before, after)

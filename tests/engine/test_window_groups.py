"""Compiled models with windows and chunks: a page table for each group, pages let go of, the same
tokens."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine.conftest import Engines
from tests.support.engines import engine_stepper, open_executor
from tests.support.loops import Loop
from tests.support.models import (
    assert_greedy,
    random_prompt,
    transformers_logits,
)
from tests.support.requests import greedy_request
from trtc.runtime.engine.loop import LoopConfig
from trtc.runtime.executors.cpu import CpuExecutor

LAYERS = {"gemma3": [[2, 5], [0, 1], [3, 4]], "llama4": [[2], [0], [1], [3]]}
"""Of the full group and of those of windows."""


@pytest.fixture(params=LAYERS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def checkpoint(family: str, tiny_engines: Engines) -> Path:
    return tiny_engines(family)[0]


@pytest.fixture
def engine(family: str, tiny_engines: Engines) -> Path:
    return tiny_engines(family)[1]


@pytest.fixture
def executor(engine: Path) -> Iterator[CpuExecutor]:
    opened = open_executor(engine, num_pages=96)
    yield opened
    opened.close()


def test_window_layers_are_groups_beside_a_full_one(executor: CpuExecutor, family: str) -> None:
    layers = LAYERS[family]
    assert executor.kv.windows == (None, *[20] * (len(layers) - 1))
    assert [[one.layer for one in group.entries] for group in executor.kv.groups] == layers


def test_logits_match_transformers_while_others_overwrite_what_windows_left(
    executor: CpuExecutor, checkpoint: Path
) -> None:
    # Three prompts would take 24 of each group if no page were let go of.
    stepper = engine_stepper(executor, num_pages=22 * len(executor.kv.groups))
    for number, chunk in enumerate((1, 23, 64)):
        prompt = random_prompt(60, seed=number)
        found = stepper.prefill(prompt, chunk, name=str(number))
        np.testing.assert_allclose(found, transformers_logits(checkpoint, prompt), atol=1e-4)


def test_a_crowded_pool_serves_the_tokens_of_transformers(engine: Path, checkpoint: Path) -> None:
    """Too few pages for two sequences at once without windows that let go."""
    executor = open_executor(engine, num_pages=34)
    shared = random_prompt(48, seed=9)
    prompts = [[*shared, *random_prompt(8, seed=seed)] for seed in range(3)]
    loop = Loop(executor, None, LoopConfig())
    loop.start()
    try:
        for attempt in ("first", "again"):
            sent = [
                loop.send(greedy_request(f"{attempt}{number}", prompt, 24, ignore_eos=True))
                for number, prompt in enumerate(prompts)
            ]
            for prompt, one in zip(prompts, sent, strict=True):
                assert_greedy(checkpoint, prompt, one.result().completions[0].token_ids, 24)
        assert loop.stats().prefix_hit_tokens > 0
    finally:
        loop.stop()
        executor.close()
    loop.check_integrity()

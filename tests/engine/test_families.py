"""Every family, compiled, against Transformers."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine.conftest import Engines
from tests.support.engines import engine_stepper, open_executor
from tests.support.evaluate import PAGE_SIZE
from tests.support.models import assert_greedy, random_prompt, transformers_logits
from trtc.runtime.executors.cpu import CpuExecutor
from trtc.runtime.frontends.local import LocalEngine

FAMILIES = (
    "llama",
    "llama_biased",
    "llama4",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_e",
    "gemma4_moe",
    "lfm2",
    "phi3",
    "phi3_longrope",
    "phimoe",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "kimi_linear",
    "olmo_hybrid",
    "qwen2_moe",
    "glm4_moe",
    "mixtral",
    "smollm3",
    "olmo3",
    "glm4",
    "cohere2",
    "nemotron",
    "ministral3",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "mistral4",
    "gpt_oss",
    "granite_moe_hybrid",
    "hunyuan_moe",
    "jamba",
    "nemotron_h",
    "nemotron_h_moe",
)
"""The variants whose kernels differ; llama3 and yarn differ in the rope table only, Granite in
constants, GLM, Helium and ERNIE in the order of weights."""
TOLERANCE = 1e-4
PROMPT = 53
CHUNKS = (1, 7, PAGE_SIZE, 23, 64)
"""Below, at and across page borders; the last takes the prompt whole."""


@pytest.fixture(scope="module", params=FAMILIES)
def engine(
    request: pytest.FixtureRequest, tiny_engines: Engines
) -> Iterator[tuple[Path, CpuExecutor]]:
    checkpoint, directory = tiny_engines(request.param)
    executor = open_executor(directory)
    yield checkpoint, executor
    executor.close()


def test_logits_match_transformers(engine: tuple[Path, CpuExecutor]) -> None:
    checkpoint, executor = engine
    prompt = random_prompt(PROMPT, seed=3)
    found = engine_stepper(executor).prefill(prompt, 64)
    np.testing.assert_allclose(
        found, transformers_logits(checkpoint, prompt), rtol=0, atol=TOLERANCE
    )


def test_chunking_changes_no_bit(engine: tuple[Path, CpuExecutor]) -> None:
    _, executor = engine
    prompt = random_prompt(PROMPT, seed=3)
    whole = engine_stepper(executor).prefill(prompt, 64)
    for chunk in CHUNKS:
        np.testing.assert_array_equal(engine_stepper(executor).prefill(prompt, chunk), whole)


def test_greedy_decoding_gives_the_tokens_of_transformers(
    engine: tuple[Path, CpuExecutor],
) -> None:
    checkpoint, executor = engine
    for length in (1, 40):  # longrope changes its factors at 32
        prompt = random_prompt(length, seed=length)
        found = engine_stepper(executor).greedy(prompt, 64, chunk=17)
        assert_greedy(checkpoint, prompt, found, 64)


def test_other_sequences_change_no_bit(engine: tuple[Path, CpuExecutor]) -> None:
    """Prefill chunks and decodes of four sequences in shared steps, on scrambled pages."""
    _, executor = engine
    prompts = {name: random_prompt(30, seed=index) for index, name in enumerate("abcd")}
    together = engine_stepper(executor, scramble=5)
    found: dict[str, list[np.ndarray]] = {name: [] for name in prompts}
    done = dict.fromkeys(prompts, 0)
    schedule = (
        {"a": 20},
        {"a": 1, "b": 29},
        {"b": 1, "c": 9, "a": 1, "d": 30},
        {"c": 21, "a": 8},
    )
    for step in schedule:
        chunks = {n: prompts[n][done[n] : done[n] + count] for n, count in step.items()}
        for name, logits in together.step(chunks).items():
            found[name].append(logits)
            done[name] += step[name]
    for name, prompt in prompts.items():
        alone = engine_stepper(executor, scramble=None).prefill(prompt, 30)
        np.testing.assert_array_equal(np.concatenate(found[name]), alone)


def test_longrope_switches_under_the_loop_as_transformers_does(tiny_engines: Engines) -> None:
    """Prompts below, at and beyond the 32 tokens where the factors change, all at once."""
    checkpoint, directory = tiny_engines("phi3_longrope")
    with LocalEngine.open(directory, num_threads=1) as engine:
        prompts = [random_prompt(length, seed=length) for length in (3, 31, 32, 33, 40)]
        running = [
            engine.generate(prompt, max_tokens=40, temperature=0.0, ignore_eos=True)
            for prompt in prompts
        ]
        for prompt, generation in zip(prompts, running, strict=True):
            found = generation.result().completions[0].token_ids
            assert_greedy(checkpoint, prompt, found, 40)

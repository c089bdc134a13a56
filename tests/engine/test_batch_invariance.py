"""A compiled engine under the whole runtime: other sequences and preemption change no token."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.engine.conftest import Engines
from tests.support.models import VOCAB_SIZE
from tests.support.small_steps import with_small_steps
from trtc.protos.manifest import read_manifest
from trtc.runtime.engine.drafting import DraftConfig
from trtc.runtime.engine.loop import LoopConfig, LoopStats
from trtc.runtime.engine.session import Session, open_session
from trtc.runtime.frontends.local import LocalEngine
from trtc.runtime.requests.completion import Result
from trtc.runtime.requests.generate_options import GenerateOptions
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.sampling.masks import pack_mask


class ByTurns:
    """One of two tokens, by turns with one of two others (implements TokenMasks)."""

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        first = 8 + 2 * (len(output_ids) % 2)
        return pack_mask((np.arange(VOCAB_SIZE) & ~1) == first)


def opened(engine: Path, num_pages: int) -> Session:
    return open_session(engine, num_threads=1, num_pages=num_pages)


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        ("llama", None),
        ("gemma2", None),
        ("qwen3_moe", None),
        ("gemma4_e", None),
        ("glm_moe_dsa", None),
        ("gemma4_e", "int4"),
    ],
)
def test_tokens_equal_solo_runs(tiny_engines: Engines, family: str, kv_dtype: str | None) -> None:
    _, engine = tiny_engines(family, kv_dtype)
    rng = random.Random(4)
    shared = [rng.randrange(3, 60) for _ in range(24)]
    prompts = [
        shared[: rng.randint(4, 24)] + [rng.randrange(3, 60) for _ in range(rng.randint(0, 9))]
        for _ in range(10)
    ]
    requests = [
        (prompt, GenerateOptions(max_tokens=20, seed=at, n=1 + at % 3, ignore_eos=True))
        for at, prompt in enumerate(prompts)
    ]
    with LocalEngine(opened(engine, 64), LoopConfig(prefix_cache=False)) as alone:
        solo = [alone.generate(prompt, **options).result() for prompt, options in requests]
    num_pages = read_manifest(engine).kv.pages_of_sequence(24 + 9 + 20) + 2
    crowd = with_small_steps(opened(engine, num_pages), 11)
    with LocalEngine(crowd, LoopConfig()) as busy_engine:
        running = [busy_engine.generate(prompt, **options) for prompt, options in requests]
        together = [generation.result() for generation in running]
        stats = busy_engine.stats()
    for lone, accompanied in zip(solo, together, strict=True):
        assert accompanied.completions == lone.completions
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0


@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen3_5"])
def test_drafts_change_no_token(tiny_engines: Engines, family: str) -> None:
    """Biases towards two tokens, or masks, make most of the answers repeat themselves."""
    _, engine = tiny_engines(family)
    rng = random.Random(5)
    requests = [
        (
            [rng.randrange(3, 60) for _ in range(6)] * 2,
            GenerateOptions(
                max_tokens=40,
                temperature=(0.0, 0.0, 0.3, 1.0)[at % 4],
                logit_bias={5: 100.0, 6: 100.0} if at % 3 else {},
                seed=at,
                logprobs=2,
                ignore_eos=True,
            ),
        )
        for at in range(8)
    ]

    masked = [
        RequestInput(token_ids=tuple(prompt), sampling={"seed": at}, max_tokens=40, logprobs=2)
        for at, (prompt, _) in enumerate(requests[:3])
    ]

    def told(drafts: DraftConfig | None) -> tuple[list[Result], LoopStats]:
        with LocalEngine(opened(engine, 64), LoopConfig(drafts=drafts)) as local:
            running = [
                *(local.generate(prompt, **options) for prompt, options in requests),
                *(local.submit(one, masks=ByTurns()) for one in masked),
            ]
            return [one.result() for one in running], local.stats()

    plain, without = told(None)
    drafted, with_drafts = told(DraftConfig(num_tokens=4))
    assert [one.completions for one in drafted] == [one.completions for one in plain]
    assert with_drafts.accepted_draft_tokens > 20
    assert without.draft_tokens == 0

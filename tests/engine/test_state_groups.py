"""A compiled model with states: snapshots, preemption and forks leave the tokens as they are."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engine.conftest import Engines
from tests.support.drafts import Replaying
from tests.support.engines import greedy_answers, open_executor
from tests.support.loops import Loop
from tests.support.masks import PromptCollector, SomeTokens
from tests.support.models import assert_greedy, random_prompt
from tests.support.requests import greedy_request, sampled_request
from trtc.runtime.engine.drafting import DraftConfig
from trtc.runtime.engine.loop import LoopConfig

pytestmark = pytest.mark.parametrize(
    "family", ["lfm2", "qwen3_5", "olmo_hybrid", "granite_moe_hybrid"]
)


@contextmanager
def running(engine: Path, num_pages: int, drafted: Sequence[Sequence[int]] = ()) -> Iterator[Loop]:
    """
    Args:
        drafted: answers by the numbers of the requests, from which drafts are made. Such a loop
            is not started yet, so that requests can come together.
    """
    executor = open_executor(engine, num_pages=num_pages)
    loop = Loop(executor, None, LoopConfig(drafts=DraftConfig() if drafted else None))
    if drafted:
        loop._pipeline._drafter = Replaying(drafted, executor.vocab_size)
    else:
        loop.start()
    try:
        yield loop
    finally:
        loop.stop()
        executor.close()
    loop.check_integrity()


def test_a_crowded_pool_serves_the_tokens_of_transformers(
    tiny_engines: Engines, family: str
) -> None:
    """Too few pages for all at once; what they have in common is computed once."""
    checkpoint, engine = tiny_engines(family)
    shared = random_prompt(48, seed=9)
    prompts = [[*shared, *random_prompt(8, seed=seed)] for seed in range(4)]
    with running(engine, 28) as loop:
        for attempt in ("first", "again"):
            sent = [
                loop.send(greedy_request(f"{attempt}{number}", prompt, 40, ignore_eos=True))
                for number, prompt in enumerate(prompts)
            ]
            for prompt, one in zip(prompts, sent, strict=True):
                assert_greedy(checkpoint, prompt, one.result().completions[0].token_ids, 40)
        stats = loop.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0


@pytest.mark.parametrize(("num_pages", "is_crowded"), [(24, True), (160, False)])
def test_drafts_change_no_token(
    tiny_engines: Engines, family: str, num_pages: int, is_crowded: bool
) -> None:
    """Drafts that are right up to random places, beside a request that is aborted; the second time
    prompts with parts of the answers go on from snapshots that steps with drafts left."""
    checkpoint, engine = tiny_engines(family)
    prompts = [random_prompt(30 + 5 * seed, seed=seed) for seed in range(4)]
    answers = greedy_answers(checkpoint, engine, prompts, 60)
    longer = [[*prompt, *answer[:40]] for prompt, answer in zip(prompts, answers, strict=True)]
    rests = [answer[40:] for answer in answers]
    with running(engine, num_pages, [*answers, *answers[:1], *rests]) as loop:
        sent = [
            loop.send(greedy_request(f"first{number}", prompt, 60, ignore_eos=True))
            for number, prompt in enumerate(prompts)
        ]
        aborted = loop.send(greedy_request("aborted", prompts[0], 60, ignore_eos=True))
        loop.start()
        aborted.first.wait()
        loop.abort("aborted")
        assert [list(one.result().completions[0].token_ids) for one in sent] == answers
        again = [
            loop.send(greedy_request(f"again{number}", prompt, 20, ignore_eos=True)).result()
            for number, prompt in enumerate(longer)
        ]
        aborted.wait()
        stats = loop.stats()
    assert [list(one.completions[0].token_ids) for one in again] == rests
    assert (stats.preemptions > 0) == is_crowded
    if not is_crowded:
        whole_pages = [(len(prompt) - 1) // 8 * 8 for prompt in longer]
        assert [one.usage.cached_prompt_tokens for one in again] == whole_pages
    assert 50 < stats.accepted_draft_tokens < stats.draft_tokens


def test_a_prompt_served_again_is_computed_from_its_last_snapshot(
    tiny_engines: Engines, family: str
) -> None:
    """A whole prompt is no hit: its last token is computed from the state before it."""
    _, engine = tiny_engines(family)
    prompt = random_prompt(48, seed=1)
    cached = []
    with running(engine, 64) as loop:
        for number in range(3):
            length = len(prompt) - number % 2
            result = loop.send(greedy_request(f"{number}", prompt[:length], 4)).result()
            cached.append(result.usage.cached_prompt_tokens)
    assert cached == [0, 40, 40]


def test_samples_of_one_prompt_go_on_from_one_state(tiny_engines: Engines, family: str) -> None:
    _, engine = tiny_engines(family)
    prompts = [random_prompt(length, seed=length) for length in (15, 16, 17)]
    requests = [
        sampled_request(f"{number}", prompt, 24, seed=number, n=3, ignore_eos=True)
        for number, prompt in enumerate(prompts)
    ]
    alone = []
    with running(engine, 64) as loop:
        for request in requests:
            result = loop.send(request).result()
            alone.append([one.token_ids for one in result.completions])
    with running(engine, 30) as loop:
        sent = [loop.send(request) for request in requests]
        together = [[one.token_ids for one in each.result().completions] for each in sent]
    assert together == alone
    assert all(len(set(samples)) == 3 for samples in alone)


def test_late_masks_delay_their_sequences_alone_and_change_no_token(
    tiny_engines: Engines, family: str
) -> None:
    """Their states before the token that is drawn anew are as they were."""
    _, engine = tiny_engines(family)
    answers, num_late = [], []
    for lateness in (0.0, 0.4):
        with running(engine, 64) as loop:
            size = loop._executor.vocab_size
            collector = loop._pipeline._masks = PromptCollector(size, lateness=lateness)
            sent = [
                loop.send(
                    sampled_request(
                        f"{number}",
                        random_prompt(13 + number, seed=number),
                        24,
                        seed=number,
                        n=1 + number % 2,
                        masks=SomeTokens(size, number) if number else None,
                        ignore_eos=True,
                    )
                )
                for number in range(4)
            ]
            results = [one.result() for one in sent]
        answers.append([one.token_ids for result in results for one in result.completions])
        num_late.append(collector.num_late)
    assert answers[0] == answers[1]
    assert num_late[0] == 0 < 20 < num_late[1]

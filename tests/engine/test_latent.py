"""A compiled model with latent attention under the loop: prefixes, preemption and drafts leave the
tokens as they are."""

import pytest

from tests.engine.conftest import Engines
from tests.engine.test_state_groups import running
from tests.support.engines import greedy_answers
from tests.support.models import assert_greedy, random_prompt
from tests.support.requests import greedy_request

FAMILIES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")


@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_token(tiny_engines: Engines, family: str) -> None:
    checkpoint, engine = tiny_engines(family)
    prompts = [random_prompt(30 + 5 * seed, seed=seed) for seed in range(3)]
    answers = greedy_answers(checkpoint, engine, prompts, 60)
    with running(engine, 160, answers) as loop:
        sent = [
            loop.send(greedy_request(f"{number}", prompt, 60, ignore_eos=True))
            for number, prompt in enumerate(prompts)
        ]
        loop.start()
        assert [list(one.result().completions[0].token_ids) for one in sent] == answers
        stats = loop.stats()
    assert 50 < stats.accepted_draft_tokens < stats.draft_tokens

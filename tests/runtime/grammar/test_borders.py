"""Where grammars meet everything else a request may ask for: random requests, and what holds."""

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.grammars import OPTIONS, grammar_engine, pyllama_grammars, tokens_of
from tests.support.servers import EOS, TOKENIZER
from trtc.runtime.engine.drafting import DraftConfig
from trtc.runtime.executors.base import DraftRows
from trtc.runtime.frontends.local import LocalEngine
from trtc.runtime.grammar.grammars import Grammars
from trtc.runtime.requests.completion import Completion, Result
from trtc.runtime.requests.grammar import Grammar
from trtc.runtime.requests.request import FinishReason
from trtc.runtime.sampling.sampler import Int32s
from trtc.runtime.scheduling.sequence import Sequence as RunningSequence
from trtc.runtime.text.tokenizer import Tokenizer

PATTERNS = (
    "(ab(cd)?){1,12}",
    "[a-c]{2,9}(xy|xyz)?",
    "forced text( and more)?\\.",
    "(yes|no|yes and no)",
    "[0-9]{1,3}(,[0-9]{3}){0,4}",
    "(é|日本|ü){1,6}",
)
Asked = dict[str, Any]


def random_request(rng: random.Random) -> Asked:
    """Options of `generate`."""
    asked: Asked = {
        "regex": rng.choice(PATTERNS),
        "seed": rng.randrange(1 << 30),
        "n": rng.choice((1, 1, 2, 3)),
        "max_tokens": rng.choice((3, 40)),
        "temperature": rng.choice((0.0, 0.6, 1.0, 2.0)),
        "logprobs": rng.choice((None, 0, 3)),
        "ignore_eos": rng.random() < 0.2,
    }
    if asked["n"] > 1:
        asked["temperature"] = max(asked["temperature"], 0.5)
    if rng.random() < 0.4:
        asked |= {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": -0.3}
    if rng.random() < 0.3:
        asked |= {"top_k": 3, "top_p": 0.8}
    if rng.random() < 0.3:
        asked["stop"] = rng.choice(["c", "b", "no", ",", "本"])
    if rng.random() < 0.3:
        asked["logit_bias"] = {EOS: rng.choice((-100.0, 100.0)), 68: 5.0}
    return asked


REQUESTS = [random_request(random.Random(seed)) for seed in range(40)]
PROMPTS = [[7] * 40 if seed % 2 else [5, 6, seed] for seed in range(40)]
"""Half of them share their pages."""


@pytest.fixture(scope="module")
def alone() -> Iterator[list[Result]]:
    """Each request by itself."""
    with grammar_engine() as engine:
        yield [
            engine.generate(prompt, **asked).result()
            for prompt, asked in zip(PROMPTS, REQUESTS, strict=True)
        ]


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    with pyllama_grammars() as opened:
        yield opened


def each(results: Sequence[Result]) -> Iterator[tuple[Asked, Completion]]:
    for asked, result in zip(REQUESTS, results, strict=True):
        assert len(result.completions) == asked["n"]
        for one in result.completions:
            yield asked, one


def test_every_token_was_allowed_and_the_end_only_where_it_may_be(
    alone: list[Result], grammars: Grammars
) -> None:
    for asked, one in each(alone):
        masks = grammars.masks(Grammar("regex", asked["regex"]), 1)
        for at, token in enumerate(one.token_ids):
            assert token in tokens_of(masks.allowed(one.token_ids[:at])), (asked, one)


def test_an_output_that_was_not_cut_is_whole(alone: list[Result]) -> None:
    tokenizer = Tokenizer.load(TOKENIZER)
    num_whole = 0
    for asked, one in each(alone):
        is_stopped = bool(one.matched_stop) and one.matched_stop == asked.get("stop")
        whole = re.fullmatch(asked["regex"], tokenizer.decode(one.token_ids))
        if EOS in one.token_ids:
            assert whole, (asked, one)
            num_whole += 1
        elif not is_stopped:
            assert one.finish_reason is FinishReason.LENGTH, (asked, one)
            assert len(one.token_ids) == asked["max_tokens"]
        if is_stopped:
            assert asked["stop"] not in one.text
        if asked["ignore_eos"] and EOS in one.token_ids:
            assert set(one.token_ids[one.token_ids.index(EOS) :]) == {EOS}
    assert num_whole > 30


def test_log_probabilities_are_those_of_allowed_tokens(
    alone: list[Result], grammars: Grammars
) -> None:
    num_forced = 0
    for asked, one in each(alone):
        if asked["logprobs"] is None:
            assert not one.logprobs
            continue
        masks = grammars.masks(Grammar("regex", asked["regex"]), 1)
        for at, entry in enumerate(one.logprobs):
            allowed = tokens_of(masks.allowed(one.token_ids[:at]))
            assert {token for token, _ in entry.top} <= allowed
            assert len(entry.top) == min(asked["logprobs"], len(allowed))
            assert entry.logprob <= 1e-5
            if len(allowed) == 1:
                assert entry.logprob == pytest.approx(0, abs=1e-5)
                num_forced += 1
            elif len(entry.top) == len(allowed):
                assert math.fsum(math.exp(value) for _, value in entry.top) == pytest.approx(1)
    assert num_forced > 10


@pytest.mark.parametrize("way", ["together", "crowded", "again"])
def test_tokens_are_the_same_however_they_are_computed(way: str, alone: list[Result]) -> None:
    """Beside others, after preemptions, by prefix hits."""
    options = replace(OPTIONS, num_pages=14) if way == "crowded" else OPTIONS
    with grammar_engine(options) as engine:
        results = run_together(engine)
        if way == "again":
            results = run_together(engine)
            assert engine.stats().prefix_hit_tokens > 0
        if way == "crowded":
            assert engine.stats().preemptions > 0
    check_same(alone, results)


class Knowing:
    """Drafts the answers of requests, by their seeds, up to a random place, and behind it any
    tokens (implements Drafter)."""

    def __init__(self, answers: Sequence[Result]) -> None:
        self._answers = {
            asked["seed"]: [one.token_ids for one in result.completions]
            for asked, result in zip(REQUESTS, answers, strict=True)
        }
        self._rng = random.Random(0)

    def propose(self, sequence: RunningSequence, history: Int32s, most: int) -> list[int]:
        answers = self._answers[sequence.request.sampling.seed or 0]
        known = answers[sequence.index][sequence.num_output :][:most]
        right = self._rng.randint(0, len(known))
        wrong = [self._rng.choice((EOS, 68, 69, 70, 71, 900)) for _ in range(right, most)]
        return [*known[:right], *wrong][: self._rng.randint(0, most)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("windows", "num_pages"), [((None,), 14), ((None, 0), 512)])
def test_drafts_change_nothing(
    windows: tuple[int | None, ...], num_pages: int, ahead: bool, alone: list[Result]
) -> None:
    """Tokens, texts, log-probabilities and reasons, with several tokens a step: drafts that are
    right, drafts that the grammar forbids, and those that go on behind its end."""
    spacious = replace(OPTIONS, windows=windows, draft_rows=DraftRows(40, as_sequences=ahead))
    with grammar_engine(spacious) as engine:
        plain = alone if windows == (None,) else run_together(engine)
    options = replace(spacious, num_pages=num_pages)
    with grammar_engine(options, DraftConfig(), ahead=ahead) as engine:
        engine._loop._pipeline._drafter = Knowing(plain)
        results = run_together(engine)
        stats = engine.stats()
    assert stats.draft_tokens > stats.accepted_draft_tokens > 40
    check_same(plain, results)
    for one, other in zip(plain, results, strict=True):
        assert other.completions == one.completions


def test_ngrams_of_a_constrained_output_are_drafted(alone: list[Result]) -> None:
    with grammar_engine(drafts=DraftConfig()) as engine:
        results = run_together(engine)
        assert engine.stats().accepted_draft_tokens > 9
    check_same(alone, results)


def check_same(results: Sequence[Result], others: Sequence[Result]) -> None:
    for one, other in zip(results, others, strict=True):
        tokens = [completion.token_ids for completion in one.completions]
        assert [completion.token_ids for completion in other.completions] == tokens


def run_together(engine: LocalEngine) -> list[Result]:
    """All at once; others among them leave in the middle."""
    pairs = list(zip(PROMPTS, REQUESTS, strict=True))
    left = [
        engine.generate(prompt, **{**asked, "max_tokens": 40, "ignore_eos": True})
        for prompt, asked in pairs[::3]
    ]
    running = [engine.generate(prompt, **asked) for prompt, asked in pairs]
    for one in left:
        next(one)
        one.cancel()
    return [one.result() for one in running]

"""Outputs under grammars: valid whatever the schema and the sampling, by `jsonschema`."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.grammars import OPTIONS, VOCAB_SIZE, grammar_engine
from tests.support.schemas import check_outputs
from tests.support.servers import TOKENIZER
from trtc.protos.errors import InvalidRequestError
from trtc.runtime.engine.drafting import DraftConfig
from trtc.runtime.frontends.local import LocalEngine
from trtc.runtime.requests.grammar import Grammar
from trtc.runtime.requests.request import FinishReason
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.token_masks import TokenEdit
from trtc.runtime.sampling.masks import pack_mask
from trtc.runtime.text.tokenizer import Tokenizer

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with grammar_engine() as opened:
        yield opened


def test_every_output_is_a_document_of_its_schema(engine: LocalEngine) -> None:
    """`python -m tests.support.schemas 10000` checks more."""
    num_whole, num_cut = check_outputs(engine, range(75))
    assert num_whole > 9 * num_cut


def test_tokens_are_the_same_alone_after_a_preemption_and_by_prefix_hits(
    engine: LocalEngine,
) -> None:
    asked: list[dict[str, Any]] = [
        {"json_schema": RECORD, "max_tokens": 120, "seed": seed, "n": 1 + seed % 2}
        for seed in range(8)
    ]
    alone = [engine.generate([7] * 40, **one).result() for one in asked]
    again = [engine.generate([7] * 40, **one).result() for one in asked]
    crowded = replace(OPTIONS, num_pages=20)
    with grammar_engine(crowded) as small:
        together = [small.generate([7] * 40, **one) for one in asked]
        results = [one.result() for one in together]
        assert small.stats().preemptions > 0
    for one, other, third in zip(alone, again, results, strict=True):
        tokens = [completion.token_ids for completion in one.completions]
        assert [completion.token_ids for completion in other.completions] == tokens
        assert [completion.token_ids for completion in third.completions] == tokens


def test_a_stop_string_ends_an_output_before_its_grammar_does(engine: LocalEngine) -> None:
    result = engine.generate([5], regex="ab{3}cd", stop="c", max_tokens=20).result()
    assert (result.text, result.finish_reason) == ("abbb", FinishReason.STOP)


def test_max_tokens_ends_an_output_inside_its_grammar(engine: LocalEngine) -> None:
    result = engine.generate([5], regex="[ab]{50,}", max_tokens=4).result()
    assert result.finish_reason is FinishReason.LENGTH
    assert set(result.text) <= {"a", "b"}


def test_a_sequence_that_goes_on_beyond_its_end_says_nothing_more(engine: LocalEngine) -> None:
    result = engine.generate([5], regex="abc", max_tokens=9, ignore_eos=True).result()
    assert result.text == "abc"
    assert len(result.token_ids) == 9


def test_an_output_can_be_aborted(engine: LocalEngine) -> None:
    generation = engine.generate([5], regex="[ab]*", max_tokens=900, logit_bias={2: -100.0})
    next(generation)
    generation.cancel()
    again = engine.generate([5], regex="[ab]c", max_tokens=9).result()
    assert again.text in ("ac", "bc")


def test_log_probabilities_are_those_of_the_tokens_that_a_grammar_leaves(
    engine: LocalEngine,
) -> None:
    result = engine.generate([5], regex="[ab]c", max_tokens=9, logprobs=20).result()
    first, *others = result.completions[0].logprobs  # "a" and "c" may be one token
    assert sum(math.exp(value) for _, value in first.top) == pytest.approx(1, abs=1e-4)
    texts = {Tokenizer.load(TOKENIZER).decode([token]) for token, _ in first.top}
    assert {"a", "b"} <= texts <= {"a", "b", "ac", "bc"}
    assert (first.token_id, first.logprob) in first.top
    assert [one.logprob for one in others] == pytest.approx([0] * len(others), abs=1e-5)
    assert [len(one.top) for one in others] == [1] * len(others)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"json_schema": {"not": {}}},
            'json_schema: cannot be compiled: Unimplemented keys: ["not"]',
        ),
        ({"json_schema": {"a": {1}}}, "json_schema: is not JSON"),
        ({"json_schema": 5}, "json_schema: is a int"),
        ({"regex": "("}, "regex: cannot be compiled"),
        ({"regex": 5}, "regex: is a int"),
        ({"regex": "a", "choice": ["b"]}, "choice: is given beside regex"),
        ({"choice": []}, "choice: has no texts"),
        ({"choice": "ab"}, "choice: is a str"),
        ({"grammar": "start: x"}, "grammar: cannot be compiled"),
        ({"json_object": 1}, "json_object: is a int"),
        ({"regex": "a", "min_tokens": 1, "max_tokens": 2}, "min_tokens: is given beside regex"),
    ],
)
def test_grammars_that_are_wrong_are_refused_by_name(
    options: dict[str, Any], problem: str, engine: LocalEngine
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.generate([5], **options)
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"choice": ["yes", "no", '"ma\'y\\be"\n']}, {"yes", "no", '"ma\'y\\be"\n'}),
        ({"regex": "(ab|c)d"}, {"abd", "cd"}),
        ({"grammar": 'start: ("a" | "b") C\nC: /[cd]/'}, {"ac", "ad", "bc", "bd"}),
        ({"grammar": 'root ::= ("a" | "b") c\nc ::= [cd]'}, {"ac", "ad", "bc", "bd"}),
    ],
)
def test_every_text_of_a_small_grammar_is_drawn_and_no_other(
    options: dict[str, Any], texts: set[str], engine: LocalEngine
) -> None:
    asked = [engine.generate([at], **options, max_tokens=20, n=4) for at in range(12)]
    drawn = {one.text for generation in asked for one in generation.result().completions}
    assert drawn == texts


def test_any_json_object(engine: LocalEngine) -> None:
    result = engine.generate(
        [5], json_object=True, max_tokens=60, regex=None, logit_bias={94: 30.0}
    ).result()
    assert result.text.startswith("{")


def test_drafts_change_no_token(engine: LocalEngine) -> None:
    """Several tokens a step, some of them taken back."""
    asked: list[dict[str, Any]] = [
        {"regex": "(ab(cd)?){20,30}", "max_tokens": 90, "seed": seed, "n": 1 + seed % 2}
        for seed in range(6)
    ]
    with grammar_engine(drafts=DraftConfig()) as drafting:
        for one in asked:
            plain, drafted = (each.generate([5, 6], **one).result() for each in (engine, drafting))
            for first, second in zip(plain.completions, drafted.completions, strict=True):
                assert first.token_ids == second.token_ids


def test_masks_of_a_caller_hold_beside_the_grammar(engine: LocalEngine) -> None:
    """As those of an operator's hook do."""

    class NoA:
        def allowed(self, output_ids: Sequence[int]) -> TokenEdit:
            allowed = np.ones(VOCAB_SIZE, np.bool_)
            allowed[68] = False  # a
            return TokenEdit(pack_mask(allowed), {69: 1.0})

    request_input = RequestInput(token_ids=(5,), grammar=Grammar("regex", "[ab]{6}"), max_tokens=9)
    assert 68 not in engine.submit(request_input, masks=NoA()).result().token_ids

    class OnlyAnother:
        """Nothing that the grammar allows is left."""

        def allowed(self, output_ids: Sequence[int]) -> bytes:
            return pack_mask(np.arange(VOCAB_SIZE) == 67)

    with pytest.raises(InvalidRequestError, match="masks: allow no token"):
        engine.submit(request_input, masks=OnlyAnother()).result()

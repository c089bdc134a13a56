"""Masks of grammars: by their argument alone, and the end where one may be."""

import random
import re
from collections.abc import Iterator, Sequence

import pytest

from tests.support.grammars import VOCAB_SIZE, pyllama_grammars, tokens_of
from tests.support.servers import EOS, TOKENIZER
from trtc.runtime.grammar.grammars import Grammars
from trtc.runtime.grammar.vocabulary import _Tokens
from trtc.runtime.requests.grammar import Grammar, choice, json_schema
from trtc.runtime.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    with pyllama_grammars() as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    loaded = Tokenizer.load(TOKENIZER)
    yield loaded
    loaded.close()


def allowed(grammars: Grammars, grammar: Grammar, output: Sequence[int]) -> set[int]:
    """By a source that was asked about nothing else."""
    return tokens_of(grammars.masks(grammar, 1).allowed(output))


def test_the_end_is_allowed_where_the_grammar_may_end(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode
    number = Grammar("regex", "[0-9]{1,3}(px)?")
    assert EOS not in allowed(grammars, number, [])
    assert EOS in allowed(grammars, number, ids("7"))
    assert EOS not in allowed(grammars, number, [*ids("7"), *ids("p")])
    assert allowed(grammars, number, [*ids("7"), *ids("px")]) == {EOS}
    assert allowed(grammars, number, [*ids("7"), EOS, EOS]) == {EOS}
    assert allowed(grammars, choice(["a", "ab"]), ids("a")) > {EOS}


def test_allowed_tokens_are_those_whose_text_goes_on_with_a_match(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    """Against every token of the vocabulary."""
    found = allowed(grammars, Grammar("regex", "[a-z]{1,4} [0-9]*"), [])
    texts = {token: tokenizer.decode([token]) for token in range(VOCAB_SIZE)}
    wanted = re.compile(r"[a-z]{1,4}|[a-z]{1,4} [0-9]*")
    assert found == {token for token, text in texts.items() if wanted.fullmatch(text)}


def test_marks_of_the_model_are_no_text(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """A grammar of any text allows no special token but the end."""
    found = allowed(grammars, Grammar("regex", "(.|\\n)*"), [])
    assert {token for token in found if tokenizer.is_special(token)} == {EOS}
    marked = tokenizer.decode([EOS], skip_special=False)
    assert EOS not in allowed(grammars, choice([marked]), [])


@pytest.mark.parametrize("text", ["esterday", "é日\n", "  x", "<|im_end|>", "x" * 40, "\x02a"])
def test_forced_texts_become_tokens_of_the_same_text(text: str, tokenizer: Tokenizer) -> None:
    tokens = _Tokens(tokenizer, VOCAB_SIZE, [EOS])
    for way in (tokens, tokens._longest):
        ids = way(text.encode())
        assert b"".join(tokenizer.token_utf8(one) for one in ids) == text.encode()
        assert not any(tokenizer.is_special(one) for one in ids)


def test_answers_depend_on_the_output_alone(grammars: Grammars) -> None:
    """Outputs of several sequences in any order: prefixes, forks, drafts that are taken back."""
    rng = random.Random(3)
    grammar = json_schema({"type": "array", "items": {"enum": ["ab", "abc", 12, None]}})
    outputs: list[list[int]] = [[]]
    expected: dict[tuple[int, ...], set[int]] = {(): allowed(grammars, grammar, [])}
    for _ in range(60):
        output = rng.choice(outputs)
        token = rng.choice(sorted(expected[tuple(output)] - {EOS} or {EOS}))
        longer = [*output, token]
        outputs.append(longer)
        expected[tuple(longer)] = allowed(grammars, grammar, longer)
    for num_sequences in (1, 3):
        source = grammars.masks(grammar, num_sequences)
        for _ in range(300):
            output = rng.choice(outputs)
            assert tokens_of(source.allowed(output)) == expected[tuple(output)]


def test_a_grammar_is_compiled_once(grammars: Grammars) -> None:
    grammar = json_schema({"const": "only here"})
    assert not grammars.is_kept(grammar)
    grammars.masks(grammar, 1)
    assert grammars.is_kept(grammar)
    assert grammars.is_kept(json_schema({"const": "only here"}, "response_format"))

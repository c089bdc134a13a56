"""Masks of grammars: by their argument alone, and the end where one may be."""

import itertools
import random
import re
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tests.support.grammars import VOCAB_SIZE, pyllama_grammars, tokens_of
from tests.support.requests import greedy_request
from tests.support.servers import EOS, TOKENIZER
from trtc.protos.errors import UnavailableError
from trtc.runtime.engine.mask_answers import Answers, Queries, Query, edits_of
from trtc.runtime.grammar import mask_computer
from trtc.runtime.grammar.grammars import Grammars
from trtc.runtime.grammar.mask_computer import MaskComputer
from trtc.runtime.grammar.mask_source import GrammarMasks
from trtc.runtime.grammar.vocabulary import _Tokens
from trtc.runtime.requests.grammar import Grammar, choice, json_schema
from trtc.runtime.scheduling.sequence import Sequence as RunningSequence
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


@pytest.fixture(scope="module")
def threaded() -> Iterator[Grammars]:
    """Grammars of a machine with CPUs for three threads that compute masks."""
    with pytest.MonkeyPatch.context() as patch, pyllama_grammars() as opened:
        patch.setattr(mask_computer, "num_threads", lambda: 3)
        yield opened


@pytest.mark.parametrize("slow_s", [-1.0, 60.0])
def test_masks_computed_together_are_those_computed_alone(
    threaded: Grammars, grammars: Grammars, slow_s: float
) -> None:
    """Steps of sequences of several requests: some of them fork, end, or begin like another; some
    have drafts, which come true, or are forbidden, or end the text. With a block that is always
    slow, every other step asks about each request alone."""
    rng = random.Random(4)
    asked = [
        Grammar("regex", "(ab|cd)*(ef)?"),
        json_schema({"type": "array", "items": {"enum": ["ab", "abc", 12, None]}}),
        choice(["x", "xy"]),
    ]
    computer = MaskComputer(VOCAB_SIZE, slow_s)
    sources = [_with_answerer(threaded, one, computer) for one in asked for _ in range(2)]
    assert len({id(one.original) for one in sources}) == len(sources)
    alone = [grammars.masks(one, 1) for one in asked for _ in range(2)]
    keys = itertools.count()
    outputs = [(number, sequence(next(keys))) for number in range(len(sources)) for _ in range(2)]
    answers, num_alone, num_drafted = Answers(), 0, 0
    last: dict[RunningSequence, Query] = {}
    for _ in range(40):
        picked = rng.sample(range(len(outputs)), rng.randrange(1, len(outputs)))
        step = [outputs[at] for at in picked]
        queries = [
            (last.get(one) or Query(sources[number], one, answers, VOCAB_SIZE)).next(
                drafted(rng, alone[number], one)
            )
            for number, one in step
        ]
        last |= zip((one for _, one in step), queries, strict=True)
        is_joint = [sources[number].answerer is computer for number, _ in step]
        num_alone += is_joint.count(False)
        computer.begin(
            Queries(answers, [one for one, joint in zip(queries, is_joint, strict=True) if joint])
        )
        for one, joint, _ in zip(queries, is_joint, step, strict=True):
            if not joint:
                one.answer_each(edits_of(one))
        answers.wait_for_all(queries, 30)
        for at, one, (number, asking) in zip(picked, queries, step, strict=True):
            assert one.is_answered
            assert one.error is None
            output = one.output_ids
            for edit, draft in zip(one.edits, [*one.drafts, None], strict=False):
                assert edit.masks is not None
                found = tokens_of(np.asarray(edit.masks)[edit.row].tobytes())
                assert found == tokens_of(alone[number].allowed(output))
                if draft is not None and draft in found and rng.random() < 0.8:
                    output.append(draft)
                else:
                    break
            num_drafted += len(output) - one.num_output
            if rng.random() < 0.2:  # another sequence, which begins like this one
                kept = output[: rng.randrange(len(output) + 1)]
                outputs[at] = (number, sequence(next(keys), kept))
            else:
                known = alone[number].allowed(output)
                asking.token_ids += [
                    *output[one.num_output :],
                    rng.choice(sorted(tokens_of(known))),
                ]
    assert (num_alone > 0) == (slow_s < 0)
    assert num_drafted > 50
    computer.close()


def drafted(rng: random.Random, source: GrammarMasks, asking: RunningSequence) -> list[int]:
    """Up to four drafts, most of which the grammar allows."""
    output, number = asking.token_ids[asking.num_prompt :], rng.choice((0, 1, 4))
    drafts = list[int]()
    while len(drafts) < number:
        allowed = sorted(tokens_of(source.allowed([*output, *drafts])))
        drafts.append(rng.choice(allowed))
        if rng.random() < 0.1:
            drafts += [rng.choice((EOS, 68, 900))] * (number - len(drafts))
    return drafts


def test_a_token_that_a_grammar_forbids_fails_its_question_alone(grammars: Grammars) -> None:
    computer = MaskComputer(VOCAB_SIZE)
    source = _with_answerer(grammars, Grammar("regex", "(ab|cd)*"), computer)
    answers = Answers()
    queries = [
        Query(source, sequence(key, output), answers, VOCAB_SIZE)
        for key, output in enumerate(([], [68, 68], [68]))
    ]
    computer.begin(Queries(answers, queries))
    answers.wait_for_all(queries, 30)
    assert [one.error is None for one in queries] == [True, False, True]
    assert "regex: cannot be kept to any longer" in str(queries[1].error)
    computer.close()
    late = Query(source, sequence(9), answers, VOCAB_SIZE)
    computer.begin(Queries(answers, [late]))
    assert isinstance(late.error, UnavailableError)


def test_a_question_goes_on_from_what_its_matcher_has_read(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    """Also after masks that were computed elsewhere, and past the end."""
    computer = MaskComputer(VOCAB_SIZE)
    text = "abcd" * 9
    source = _with_answerer(grammars, Grammar("regex", text), computer)
    answers, one = Answers(), sequence(1)
    (*output,) = tokenizer.encode(text)
    query = Query(source, one, answers, VOCAB_SIZE)
    for at in range(len(output) + 3):
        query = query.next(())
        if at % 4 == 3:
            query.answer_each(edits_of(query))
        else:
            computer.begin(Queries(answers, [query]))
        answers.wait_for_all([query], 30)
        assert query.error is None
        (edit,) = query.edits
        assert edit.masks is not None
        expected = source.allowed(query.output_ids)
        assert np.asarray(edit.masks)[edit.row].tobytes() == expected
        one.token_ids.append([*output, EOS, EOS, EOS][at])
    computer.close()


def sequence(number: int, output: Sequence[int] = ()) -> RunningSequence:
    request = greedy_request(str(number), (5,), 99)
    one = RunningSequence(request, number=number, order=(0.0, 0, number), eos_token_ids=frozenset())
    one.token_ids += output
    return one


def _with_answerer(grammars: Grammars, grammar: Grammar, computer: MaskComputer) -> GrammarMasks:
    source = grammars.masks(grammar, 2)
    source._answerer = computer
    return source

"""A thought ends once its tokens are spent, whoever began it."""

import pytest

from tests.support.servers import TOKENIZER
from trtc.protos.answer_formats import ANSWER_FORMATS
from trtc.runtime.sampling.thought_budget import ThoughtBudget
from trtc.runtime.text.tokenizer import Tokenizer

VOCAB = 4096


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TOKENIZER)


def _written(tokenizer: Tokenizer, text: str, budget: int, *, in_thought: bool) -> str:
    """What a model writes that wants to write `text`, and takes what alone is allowed."""
    thought = ANSWER_FORMATS["think"].thought
    assert thought is not None
    masks = ThoughtBudget(tokenizer, thought, budget, vocab_size=VOCAB, in_thought=in_thought)
    output: list[int] = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        mask = masks.allowed(output).mask
        while mask is not None:
            (only,) = [one for one in range(VOCAB) if mask[one // 8] >> one % 8 & 1]
            output.append(only)
            mask = masks.allowed(output).mask
        output.append(token)
    return tokenizer.decode(output, skip_special=False)


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_thought_of_the_prompt(tokenizer: Tokenizer, budget: int) -> None:
    text = "def f(x): return x"
    written = _written(tokenizer, text, budget, in_thought=True)
    thought, answer = written.split("</think>")
    assert thought + answer == text
    assert len(tokenizer.encode(thought, add_special_tokens=False)) == budget


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_thought_of_the_model(tokenizer: Tokenizer, budget: int) -> None:
    written = _written(tokenizer, "<think>def f(x): return x", budget, in_thought=False)
    assert written.startswith("<think>")
    assert written.count("</think>") == 1
    thought = written.removeprefix("<think>").split("</think>")[0]
    assert len(tokenizer.encode(thought, add_special_tokens=False)) <= budget + 1


@pytest.mark.parametrize("in_thought", [False, True])
def test_what_ends_in_time_is_left_alone(tokenizer: Tokenizer, *, in_thought: bool) -> None:
    text = "x</think>def f(x): return x" if in_thought else "def f(x): return x"
    assert _written(tokenizer, text, 9, in_thought=in_thought) == text

"""Log-probabilities of prompts, of a compiled engine in a busy loop, against Transformers."""

import numpy as np
import pytest

from tests.engine.conftest import Engines
from tests.support.engines import open_executor
from tests.support.loops import PATIENCE_S, Loop
from tests.support.models import random_prompt, transformers_logits
from tests.support.requests import greedy_request
from trtc.runtime.engine.loop import LoopConfig


@pytest.mark.parametrize("num_others", [0, 3])
def test_prompt_logprobs_match_transformers(tiny_engines: Engines, num_others: int) -> None:
    """A step has four logit rows: alone the prompt is computed in chunks of four tokens, beside
    three that decode token by token."""
    checkpoint, directory = tiny_engines("llama")
    prompt = [int(token) for token in random_prompt(53, seed=3)]
    logits = np.asarray(transformers_logits(checkpoint, prompt), np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    executor = open_executor(directory)
    loop = Loop(executor, None, LoopConfig())
    loop.start()
    try:
        others = [
            loop.send(greedy_request(f"other{at}", prompt[: 5 + at], 70))
            for at in range(num_others)
        ]
        for other in others:
            assert other.first.wait(PATIENCE_S)
        result = loop.send(greedy_request("scored", prompt, 1, prompt_logprobs=2)).result()
    finally:
        loop.stop()
        executor.close()
    assert [entry.token_id for entry in result.prompt_logprobs] == prompt[1:]
    expected = logprobs[np.arange(52), prompt[1:]]
    found = [entry.logprob for entry in result.prompt_logprobs]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
    for row, entry in enumerate(result.prompt_logprobs):
        best = np.sort(logprobs[row])[::-1][:2]
        np.testing.assert_allclose([value for _, value in entry.top], best, rtol=0, atol=1e-3)

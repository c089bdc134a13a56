"""Masks: what they forbid is never drawn, and the rest as if nothing else were there."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.masks import drawn_masks
from tests.support.sampling_oracle import Case, cases, distribution, invert
from trtc.protos.errors import InvalidRequestError
from trtc.protos.sampling import SamplingParams
from trtc.protos.step import num_mask_words
from trtc.runtime.sampling.masks import RowMasks, pack_mask, read_mask
from trtc.runtime.sampling.philox import uniforms
from trtc.runtime.sampling.sampler import SamplingBatch, sample


@settings(max_examples=150, deadline=None)
@given(case=cases([10, 32, 33, 700]), seed=st.integers(0, 2**32 - 1))
def test_tokens_are_those_of_the_oracle(case: Case, seed: int) -> None:
    allowed, masks = drawn_masks(case.logits.shape, seed)
    batch = replace(case.batch, masks=masks)
    tokens = sample(case.logits, batch)
    assert tokens.invalid_rows == ()
    for row, params in enumerate(case.params):
        token = tokens.token_ids[row]
        assert allowed[row, token]
        scores = [
            score if may else -math.inf
            for score, may in zip(case.scores(row), allowed[row], strict=True)
        ]
        if params.temperature == 0:
            assert scores[token] >= max(scores) - 1e-4
            continue
        probabilities = distribution(scores, params)
        position = np.array([len(case.outputs[row])])
        random = uniforms(np.array([params.seed], np.uint64), np.array([0]), position)
        expected, nearest = invert(probabilities, float(random[0]))
        assert token == expected or nearest < 1e-4 or probabilities[token] == 0


@settings(max_examples=50, deadline=None)
@given(case=cases([33, 128]), seed=st.integers(0, 2**32 - 1))
def test_rows_without_masks_draw_as_they_do_alone(case: Case, seed: int) -> None:
    _, masks = drawn_masks(case.logits.shape, seed)
    free = np.setdiff1d(np.arange(len(case.logits)), masks.rows)
    masked = sample(case.logits, replace(case.batch, masks=masks))
    assert (masked.token_ids[free] == sample(case.logits, case.batch).token_ids[free]).all()


def test_a_mask_of_every_token_changes_nothing() -> None:
    logits = np.random.default_rng(0).normal(size=(20, 300)).astype(np.float32)
    batch = SamplingBatch.of([SamplingParams(seed=row, top_p=0.9) for row in range(20)])
    every = np.full((20, num_mask_words(300)), 0xFFFFFFFF, np.uint32)
    masks = RowMasks(np.arange(20, dtype=np.int32), every)
    masked = sample(logits, replace(batch, masks=masks))
    assert (masked.token_ids == sample(logits, batch).token_ids).all()


def test_log_probabilities_are_those_among_the_tokens_that_a_mask_leaves() -> None:
    logits = np.array([[3.0, 1.0, 2.0, 1.5], [3.0, 1.0, 2.0, 1.5]], np.float32)
    biased = SamplingParams(temperature=0.0, logit_bias={1: 9.0})
    batch = SamplingBatch.of([biased, biased], num_logprobs=[3, 3])
    words = read_mask(pack_mask(np.array([False, True, True, False])), 4)[None]
    masks = RowMasks(np.array([1], np.int32), words)
    logprobs = sample(logits, replace(batch, masks=masks)).logprobs
    assert logprobs is not None
    whole, left = (math.log(sum(map(math.exp, row))) for row in ((3, 1, 2, 1.5), (1, 2)))
    assert logprobs.token.tolist() == pytest.approx([1 - whole, 1 - left])
    assert logprobs.num_top.tolist() == [3, 2]
    assert logprobs.top_ids[0].tolist() == [0, 2, 3]
    assert logprobs.top_ids[1, :2].tolist() == [2, 1]
    assert logprobs.top[1, :2].tolist() == pytest.approx([2 - left, 1 - left])


@settings(max_examples=40, deadline=None)
@given(case=cases([10, 33, 128]), seed=st.integers(0, 2**32 - 1))
def test_log_probabilities_are_those_of_a_slow_softmax(case: Case, seed: int) -> None:
    allowed, masks = drawn_masks(case.logits.shape, seed)
    asked = np.full(len(case.logits), 5, np.int32)
    batch = replace(case.batch, masks=masks, num_logprobs=asked)
    tokens = sample(case.logits, batch)
    assert tokens.logprobs is not None
    for row in set(range(len(case.logits))) - set(tokens.invalid_rows):
        left = [
            (token, float(value))
            for token, value in enumerate(case.logits[row])
            if row not in masks.rows or allowed[row, token]
        ]
        total = math.log(math.fsum(math.exp(value) for _, value in left))
        left.sort(key=lambda one: -one[1])
        number = int(tokens.logprobs.num_top[row])
        assert number == min(5, len(left))
        expected = [value - total for _, value in left[:number]]
        assert tokens.logprobs.top[row, :number].tolist() == pytest.approx(expected, abs=1e-4)
        drawn = float(case.logits[row, tokens.token_ids[row]]) - total
        assert float(tokens.logprobs.token[row]) == pytest.approx(drawn, abs=1e-4)


def test_a_row_whose_allowed_tokens_are_impossible_is_invalid() -> None:
    logits = np.array([[-math.inf, 1.0], [0.0, 1.0]], np.float32)
    words = np.array([[1], [1]], np.uint32)
    masks = RowMasks(np.array([0, 1], np.int32), words)
    for params in (SamplingParams(temperature=0.0), SamplingParams()):
        batch = SamplingBatch.of([params, params])
        tokens = sample(logits, replace(batch, masks=masks))
        assert tokens.invalid_rows == (0,)
        assert tokens.token_ids[1] == 0


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 200])
def test_masks_are_read_as_they_were_packed(vocab: int) -> None:
    allowed = np.arange(vocab) % 3 == 0
    words = read_mask(pack_mask(allowed), vocab)
    assert words.shape == (num_mask_words(vocab),)
    for token in range(vocab):
        assert bool(words[token // 32] >> np.uint32(token % 32) & 1) == allowed[token]
    ones = read_mask(b"\xff" * 4 * num_mask_words(vocab), vocab)
    assert sum(int(word).bit_count() for word in ones) == vocab, "bits behind the vocabulary"


def test_masks_of_another_size_or_without_a_token_are_refused() -> None:
    for mask, problem in ((b"\x01" * 4, "gave 4 bytes"), (bytes(8), "allow no token")):
        with pytest.raises(InvalidRequestError, match=problem):
            read_mask(mask, 33)
    with pytest.raises(InvalidRequestError, match="allow no token"):
        read_mask(bytes(4) + b"\xfe\xff\xff\xff", 33)

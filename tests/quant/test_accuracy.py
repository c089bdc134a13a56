"""KL, top-1 and perplexity against formulas written out, and their limits."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtc.protos.errors import AccuracyError, InvariantError
from trtc.quant import accuracy
from trtc.quant.accuracy import kl_divergence, log_softmax, measure, perplexity
from trtc.quant.calibration_text import TokenSet


def random_logits(seed: int, rows: int, vocab: int, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, (rows, vocab)).astype(np.float32)


def ids(seed: int, rows: int, vocab: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, rows).astype(np.int32)


def by_the_book(ours: np.ndarray, theirs: np.ndarray, tokens: np.ndarray) -> dict[str, float]:
    """One row after another, from probabilities."""
    kl, nll, agree = 0.0, 0.0, 0
    for row, target in zip(range(len(tokens) - 1), tokens[1:], strict=True):
        q = [math.exp(float(x)) for x in ours[row]]
        p = [math.exp(float(x)) for x in theirs[row]]
        q, p = [x / sum(q) for x in q], [x / sum(p) for x in p]
        kl += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        nll -= math.log(q[target])
        agree += q.index(max(q)) == p.index(max(p))
    count = len(tokens) - 1
    return {"kl": kl / count, "perplexity": math.exp(nll / count), "top1": agree / count}


@given(seed=st.integers(0, 1 << 30), rows=st.integers(2, 9), vocab=st.integers(2, 17))
def test_by_the_book(seed: int, rows: int, vocab: int) -> None:
    ours, theirs = random_logits(seed, rows, vocab), random_logits(seed + 1, rows, vocab)
    tokens = ids(seed, rows, vocab)
    found = measure([ours], [theirs], [tokens])
    expected = by_the_book(ours, theirs, tokens)
    assert found.kl == pytest.approx(expected["kl"], rel=1e-9, abs=1e-12)
    assert found.perplexity == pytest.approx(expected["perplexity"], rel=1e-9)
    assert found.top1 == expected["top1"]
    assert found.tokens == rows - 1


@given(seed=st.integers(0, 1 << 30), rows=st.integers(2, 9), vocab=st.integers(2, 17))
def test_a_model_is_no_nats_from_itself(seed: int, rows: int, vocab: int) -> None:
    logits = random_logits(seed, rows, vocab)
    found = measure([logits], [logits + np.float32(2.0)], [ids(seed, rows, vocab)])
    assert found.kl == pytest.approx(0.0, abs=1e-6)
    assert found.kl is not None and found.kl >= 0.0
    assert found.reference_perplexity == pytest.approx(found.perplexity, rel=1e-5)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, tokens = random_logits(0, 33, 11), random_logits(1, 33, 11), ids(0, 33, 11)
    whole = measure([ours], [theirs], [tokens])
    monkeypatch.setattr(accuracy, "_CHUNK_ELEMENTS", 22)
    chunked = measure([ours], [theirs], [tokens])
    assert chunked.kl == pytest.approx(whole.kl, rel=1e-12)
    assert chunked.perplexity == pytest.approx(whole.perplexity, rel=1e-12)
    assert chunked.top1 == whole.top1


def test_sequences_weigh_by_their_tokens() -> None:
    vocab = 7
    parts = [
        (random_logits(n, rows, vocab), random_logits(n + 9, rows, vocab), ids(n, rows, vocab))
        for n, rows in enumerate((3, 20))
    ]
    found = measure([p[0] for p in parts], [p[1] for p in parts], [p[2] for p in parts])
    each = [measure([a], [b], [c]) for a, b, c in parts]
    assert found.tokens == 21
    assert found.kl == pytest.approx(sum((e.kl or 0) * e.tokens for e in each) / 21)


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[3e38, 0, -3e38], [0, 0, 0]], np.float32)
    found = measure([logits], [logits], [np.array([0, 0], np.int32)])
    assert found.perplexity == pytest.approx(1.0)
    assert found.kl == 0.0


def test_what_the_reference_rules_out_adds_nothing() -> None:
    p = np.log(np.array([[1.0, 0.0]]), where=[[True, False]], out=np.array([[0.0, -np.inf]]))
    q = log_softmax(np.array([[0.0, 0.0]]))
    assert kl_divergence(p, q)[0] == pytest.approx(math.log(2))


def test_streams_are_consumed_lazily() -> None:
    alive: list[int] = []

    def stream(start: int):  # type: ignore[no-untyped-def]
        for n in range(3):
            alive.append(n)
            assert len(alive) <= 2 * (n + 1), "a stream ran ahead"
            yield random_logits(start + n, 5, 6)

    tokens = [ids(n, 5, 6) for n in range(3)]
    assert measure(stream(0), stream(9), tokens).tokens == 12


def test_without_a_reference_there_is_perplexity_only() -> None:
    found = measure([random_logits(0, 4, 5)], None, [ids(0, 4, 5)])
    assert (found.kl, found.top1, found.reference_perplexity) == (None, None, None)
    facts = found.facts(TokenSet("mine.txt", "ab", ()), "cpu")
    assert (facts.kl, facts.text, facts.text_sha256) == (None, "mine.txt", "ab")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    logits = random_logits(0, 4, 5)
    logits[1, 2] = bad
    with pytest.raises(AccuracyError, match="overflows"), np.errstate(invalid="ignore"):
        measure([logits], [random_logits(1, 4, 5)], [ids(0, 4, 5)])


def test_another_vocabulary_is_an_error() -> None:
    with pytest.raises(AccuracyError, match="has 6 tokens where the engine has 5"):
        measure([random_logits(0, 4, 5)], [random_logits(1, 4, 6)], [ids(0, 4, 5)])


def test_missing_rows_are_a_bug() -> None:
    with pytest.raises(InvariantError):
        measure([random_logits(0, 3, 5)], None, [ids(0, 4, 5)])


def test_missing_sequences_are_a_bug() -> None:
    with pytest.raises(ValueError, match="shorter"):
        measure([random_logits(0, 4, 5)], None, [ids(0, 4, 5), ids(1, 4, 5)])


def test_a_single_token_predicts_nothing() -> None:
    with pytest.raises(AccuracyError, match="no token to predict"):
        measure([random_logits(0, 1, 5)], None, [ids(0, 1, 5)])


def test_perplexity_beyond_a_float() -> None:
    assert perplexity(1e6, 1) == math.inf
    assert perplexity(0.0, 5) == 1.0

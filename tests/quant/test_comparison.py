"""quant/comparison.py, beside torch's KL divergence."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from trtc.protos.errors import AccuracyError
from trtc.protos.manifest import Canary, LayerError
from trtc.quant.comparison import MAX_SPLITS, compare, continuation, layer_pairs

VOCAB, LENGTHS = 50, (9, 2, 33)
Float32s = NDArray[np.float32]
Sequences = list[NDArray[np.int32]]


def random_case() -> tuple[list[Float32s], list[Float32s], Sequences]:
    rng = np.random.default_rng(3)
    first = [rng.normal(size=(n, VOCAB)).astype(np.float32) for n in LENGTHS]
    second = [one + rng.normal(0, 0.3, one.shape).astype(np.float32) for one in first]
    return first, second, [rng.integers(0, VOCAB, n).astype(np.int32) for n in LENGTHS]


def expected_kl(first: list[Float32s], second: list[Float32s]) -> list[NDArray[np.float64]]:
    """Of each predicted token, by sequence."""
    found = []
    for one, other in zip(first, second, strict=True):
        p, q = (torch.from_numpy(x[:-1]).double().log_softmax(-1) for x in (one, other))
        found.append(F.kl_div(q, p, reduction="none", log_target=True).sum(-1).numpy())
    return found


def test_divergence_is_torchs() -> None:
    first, second, ids = random_case()
    found, kl = compare(first, second, ids), expected_kl(first, second)
    assert found.tokens == sum(n - 1 for n in LENGTHS)
    assert found.kl == pytest.approx(np.concatenate(kl).mean())
    for logits, perplexity in zip((first, second), found.perplexities, strict=True):
        loss = sum(
            F.cross_entropy(
                torch.from_numpy(one[:-1]).double(),
                torch.from_numpy(tokens[1:]).long(),
                reduction="sum",
            ).item()
            for one, tokens in zip(logits, ids, strict=True)
        )
        assert perplexity == pytest.approx(np.exp(loss / found.tokens))


def test_bands_have_every_token_once() -> None:
    first, second, ids = random_case()
    found, kl = compare(first, second, ids), expected_kl(first, second)
    assert [(band.begin, band.end) for band in found.bands] == [
        (1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64),
    ]  # fmt: skip
    assert sum(band.tokens for band in found.bands) == found.tokens
    for band in found.bands:
        inside = np.concatenate([one[band.begin - 1 : band.end - 1] for one in kl])
        assert band.tokens == len(inside) and band.kl == pytest.approx(inside.mean())


def test_splits_are_the_largest_where_choices_differ() -> None:
    first, second, ids = random_case()
    found, kl = compare(first, second, ids), expected_kl(first, second)
    apart = sorted(
        (
            (float(kl[n][row]), n, row)
            for n in range(len(ids))
            for row in range(len(ids[n]) - 1)
            if first[n][row].argmax() != second[n][row].argmax()
        ),
        reverse=True,
    )
    assert found.top1 == pytest.approx(1 - len(apart) / found.tokens)
    assert len(found.splits) == min(MAX_SPLITS, len(apart)) > 1
    for split, (divergence, n, row) in zip(found.splits, apart, strict=False):
        assert (split.sequence, split.position, split.token) == (n, row + 1, ids[n][row + 1])
        assert split.choices == (first[n][row].argmax(), second[n][row].argmax())
        assert split.kl == pytest.approx(divergence)


def test_an_engine_beside_itself() -> None:
    first, _, ids = random_case()
    found = compare(first, first, ids)
    assert (found.kl, found.top1, found.splits) == (0.0, 1.0, ())


def test_logits_that_are_not_finite_or_of_another_vocabulary() -> None:
    first, second, ids = random_case()
    with pytest.raises(AccuracyError, match="has 49 tokens where the engine has 50"):
        compare(first, [one[:, 1:] for one in second], ids)
    second[1][0, 3] = np.nan
    with pytest.raises(AccuracyError, match="sum is nan"):
        compare(first, second, ids)


def test_continuations_part_at_the_first_token_that_differs() -> None:
    first = Canary(prompt_ids=(1,), token_ids=(4, 5, 6, 7), margins=(1.0, 2.0, 0.5, 1.0))
    second = Canary(prompt_ids=(1,), token_ids=(4, 5, 8, 7), margins=(1.0, 2.0, 0.25, 1.0))
    found = continuation(3, first, second)
    assert (found.prompt, found.agreed, found.choices) == (3, (4, 5), (6, 8))
    assert found.margins == (0.5, 0.25)
    alike = continuation(0, first, first)
    assert (alike.agreed, alike.choices) == (first.token_ids, None)


def test_linears_of_both_builds_by_how_much_they_differ() -> None:
    def errors(**decibels: float) -> list[LayerError]:
        return [LayerError(name, value, 0.0) for name, value in decibels.items()]

    pairs = layer_pairs(errors(a=40.0, b=30.0, c=20.0), errors(b=31.0, c=12.5, d=9.0))
    assert [(pair.layer, pair.difference) for pair in pairs] == [("c", 7.5), ("b", -1.0)]

"""Known answers of the paper's own implementation (Random123, kat_vectors)."""

import numpy as np
import pytest

from trtc.runtime.sampling.philox import philox4x32, uniforms

ONES = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox4x32(np.array([counter], np.uint64), np.array([key], np.uint64))
    assert tuple(words[0].tolist()) == expected


def test_uniforms_differ_in_each_of_their_arguments_and_are_uniform() -> None:
    number = 20_000
    seeds = np.full(number, 2**63 + 5, np.uint64)
    zeros, count = np.zeros(number, np.int64), np.arange(number)
    columns = [
        uniforms(seeds, zeros, count),
        uniforms(seeds, count, zeros),
        uniforms(count.astype(np.uint64), zeros, zeros),
        uniforms(count.astype(np.uint64) << np.uint64(32), zeros, zeros),
    ]
    for column in columns:
        assert len(np.unique(column)) == number
        assert 0 <= column.min() < column.max() < 1
        observed, _ = np.histogram(column, bins=50, range=(0, 1))
        chi_square = ((observed - number / 50) ** 2 / (number / 50)).sum()
        assert chi_square < 99  # 49 degrees of freedom: p < 3e-5
    for one in range(4):
        for other in range(one):
            assert abs(np.corrcoef(columns[one], columns[other])[0, 1]) < 0.03

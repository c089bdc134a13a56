"""Logarithmic histograms of durations, for percentiles of the last seconds."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

_PER_OCTAVE = 16
"""Buckets per doubling of the duration: the error of a percentile is at most 2.2%."""
_SHORTEST_S = 1e-6


def size_of(seconds: float) -> int:
    """The bucket of a duration."""
    return int(_PER_OCTAVE * math.log2(max(seconds, _SHORTEST_S) / _SHORTEST_S))


def percentiles(
    counts: Iterable[Mapping[int, int]], shares: Sequence[float]
) -> tuple[float | None, ...]:
    """Percentiles in seconds of all counts together, for `shares` (ascending, 0 to 1); None: there
    are no counts."""
    together: Counter[int] = Counter()
    for one in counts:
        together.update(one)
    total = together.total()
    if not total:
        return (None,) * len(shares)
    found: list[float] = []
    num_smaller = 0
    for size, number in sorted(together.items()):
        num_smaller += number
        while len(found) < len(shares) and num_smaller >= shares[len(found)] * total:
            found.append(_SHORTEST_S * 2 ** ((size + 0.5) / _PER_OCTAVE))
    return tuple(found)

"""Counts of durations by size, from which percentiles of the last seconds are read."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

_PER_OCTAVE = 16
"""Sizes between a duration and its double: a percentile is off by 2.2% at most."""
_SHORTEST_S = 1e-6


def size_of(seconds: float) -> int:
    """The number of the size that a duration counts as."""
    return int(_PER_OCTAVE * math.log2(max(seconds, _SHORTEST_S) / _SHORTEST_S))


def percentiles(
    counts: Iterable[Mapping[int, int]], shares: Sequence[float]
) -> tuple[float | None, ...]:
    """Durations in seconds, of all counts together, that `shares` (ascending, 0 to 1) of the
    counted ones do not exceed; None: nothing was counted."""
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

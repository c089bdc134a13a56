"""Which captured graph runs a step: extents rounded up, so that few graphs serve all steps."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trtc.protos.launch_plan import Axis, CallLaunches, CallVariant, GridAxis, TacticTable
from trtc.protos.manifest import Limits

_SMALL = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 896, 1024),
    *(1280, 1536, 1792, 2048),
)
"""Each further bucket costs 10 ms once, for capture, and saves padded rows. The effect of 160, 320,
640, 896, 1280 and 1792 on Llama-3.1-8B on an H200, in milliseconds without and with them (decodes
at 640 tokens of context, alone or with one prompt):

| decodes + prompt | 160 | 320 | 128 + 512 | 128 + 1024 | 256 + 1024 | 256 + 1536 |
|---|---|---|---|---|---|---|
| fp8 | 6.78, 6.54 | 11.33, 10.85 | 12.1, 11.5 | 19.3, 18.0 | 22.0, 20.5 | 28.2, 27.5 |
| fp8, fp8 KV | 5.34, 5.10 | 8.68, 8.07 | 11.2, 10.7 | 18.5, 17.0 | 20.4, 18.7 | 26.6, 25.4 |
| bf16 | 8.72, 8.46 | 15.0, 14.1 | 19.6, 17.4 | 35.3, 30.7 | 38.2, 33.1 | 49.3, 45.2 |

But 224 decodes are slower with their own bucket (8.38 in fp8, 8.08 as 256), and so are 448 (17.58;
14.91 as 512), because cuBLASLt's first heuristic results are slow for them.
"""
_STEP = 512
"""Distance of buckets beyond the small ones."""


@dataclass(frozen=True)
class Bucket:
    """The extents that a graph was captured for; it runs every step with at most these extents."""

    kind: Literal["decode", "mixed"]
    """decode: every sequence has exactly one new token."""
    tokens: int
    sequences: int
    rows: int
    splits: int
    """Splits of the longest context."""

    def extent(self, axis: Axis) -> int:
        return {
            "tokens": self.tokens,
            "sequences": self.sequences,
            "rows": self.rows,
            "splits": self.splits,
            "one": 1,
        }[axis]


@dataclass(frozen=True)
class Buckets:
    """The buckets of one engine."""

    limits: Limits
    split_keys: int
    max_splits: int
    max_rows: int
    """Most logit rows of a step, and most sequences of its batch, drafts included (DraftRows)."""

    def of(
        self, *, num_tokens: int, num_sequences: int, num_rows: int, longest_context: int
    ) -> Bucket:
        """The smallest bucket that holds a step."""
        splits = _power_of_two(-(-longest_context // self.split_keys))
        splits = min(splits, self.max_splits, -(-self.limits.max_seq_len // self.split_keys))
        if num_tokens == num_sequences == num_rows:
            sequences = _round_up(num_sequences, self.max_rows)
            return Bucket("decode", sequences, sequences, sequences, splits)
        return Bucket(
            kind="mixed",
            tokens=_round_up(num_tokens, self.limits.max_num_tokens),
            sequences=_round_up(num_sequences, self.max_rows),
            rows=_round_up(max(1, num_rows), self.max_rows),
            splits=splits,
        )


def fitting_variants(call: CallLaunches, bucket: Bucket) -> Iterator[tuple[int, CallVariant]]:
    """The variants of a call that support every step of a bucket, with their numbers."""
    rows = bucket.extent(call.rows)
    for number, variant in enumerate(call.variants):
        if rows <= variant.max_rows and (variant.kind == "any" or bucket.kind == "decode"):
            yield number, variant


class Tactics:
    """Picks the variant of a call: that of a tuned table, else the first that fits."""

    def __init__(self, table: TacticTable | None = None) -> None:
        self._tuned = {
            (site, tactic.kind, tactic.rows): tactic.variant
            for tactic in (table.tactics if table is not None else ())
            for site in tactic.sites
        }

    def pick(self, call: CallLaunches, bucket: Bucket) -> CallVariant:
        fitting = dict(fitting_variants(call, bucket))
        tuned = self._tuned.get((call.site, bucket.kind, bucket.extent(call.rows)), -1)
        return fitting.get(tuned) or next(iter(fitting.values()))


def grid_of(axes: tuple[GridAxis, GridAxis, GridAxis], bucket: Bucket) -> tuple[int, int, int]:
    """Programs along x, y and z."""
    x, y, z = (
        axis.times
        * (
            -(-bucket.extent(axis.axis) // axis.block)
            + (bucket.extent(axis.plus) if axis.plus else 0)
        )
        for axis in axes
    )
    return x, y, z


def _round_up(extent: int, most: int) -> int:
    if extent <= _SMALL[-1]:
        return min(_SMALL[bisect_left(_SMALL, extent)], most)
    return min(-(-extent // _STEP) * _STEP, most)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()

"""Rounding steps up to buckets, and what a bucket's launches look like."""

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtc.protos.launch_plan import CallLaunches, CallVariant, GridAxis, Tactic, TacticTable
from trtc.protos.manifest import Limits
from trtc.runtime.executors.cuda.buckets import Bucket, Buckets, Tactics, grid_of

LIMITS = Limits(max_batch_size=40, max_seq_len=3000, max_num_tokens=5000)
BUCKETS = Buckets(LIMITS, split_keys=256, max_splits=64, max_rows=40)


@given(
    sequences=st.integers(1, 40),
    extra=st.integers(0, 4960),
    rows=st.integers(0, 40),
    context=st.integers(1, 3000),
)
def test_a_bucket_holds_its_step_and_stays_within_the_limits(
    sequences: int, extra: int, rows: int, context: int
) -> None:
    tokens = sequences + extra
    bucket = BUCKETS.of(
        num_tokens=tokens, num_sequences=sequences, num_rows=rows, longest_context=context
    )
    assert tokens <= bucket.tokens <= 5000
    assert sequences <= bucket.sequences <= 40
    assert rows <= bucket.rows <= 40
    assert context <= bucket.splits * 256
    assert bucket.splits <= 12
    assert (bucket.kind == "decode") == (tokens == sequences == rows)


def test_drafts_are_decodes_beyond_the_sequences_that_an_engine_serves() -> None:
    limits = Limits(max_batch_size=2, max_seq_len=3000, max_num_tokens=64)
    buckets = Buckets(limits, split_keys=256, max_splits=64, max_rows=16)
    for rows in range(1, 17):
        decode = buckets.of(num_tokens=rows, num_sequences=rows, num_rows=rows, longest_context=300)
        assert decode.kind == "decode"
        assert rows <= decode.tokens == decode.sequences == decode.rows <= 16
    mixed = buckets.of(num_tokens=40, num_sequences=11, num_rows=11, longest_context=300)
    assert (mixed.kind, mixed.sequences, mixed.rows) == ("mixed", 16, 16)


def test_steps_of_decodes_share_few_graphs() -> None:
    found = {
        BUCKETS.of(num_tokens=n, num_sequences=n, num_rows=n, longest_context=context)
        for n in range(1, 41)
        for context in range(1, 3001, 50)
    }
    assert {bucket.tokens for bucket in found} == {1, 2, 4, 8, 16, 24, 32, 40}
    assert {bucket.splits for bucket in found} == {1, 2, 4, 8, 12}


def test_a_long_context_falls_into_no_more_splits_than_are_launched() -> None:
    long = Limits(max_batch_size=40, max_seq_len=100_000, max_num_tokens=5000)
    buckets = Buckets(long, split_keys=256, max_splits=64, max_rows=40)
    found = [
        buckets.of(num_tokens=1, num_sequences=1, num_rows=1, longest_context=context).splits
        for context in (1, 257, 9000, 16_384, 16_385, 100_000)
    ]
    assert found == [1, 2, 64, 64, 64, 64]


def test_steps_of_many_rows_waste_little() -> None:
    """Where products are most of a step, the rows that are not there cost as much as the others."""
    roomy = Buckets(Limits(512, 3000, 5000), split_keys=256, max_splits=64, max_rows=512)
    for tokens in range(513, 2049):
        bucket = roomy.of(num_tokens=tokens, num_sequences=1, num_rows=1, longest_context=3000)
        assert bucket.tokens - tokens < min(256, tokens / 4)
    for sequences in range(129, 385):
        bucket = roomy.of(
            num_tokens=sequences, num_sequences=sequences, num_rows=sequences, longest_context=600
        )
        assert bucket.kind == "decode"
        assert bucket.sequences <= 4 / 3 * sequences


def test_a_large_step_wastes_less_than_a_third() -> None:
    for tokens in range(17, 5001):
        bucket = BUCKETS.of(num_tokens=tokens, num_sequences=1, num_rows=1, longest_context=3000)
        assert bucket.tokens <= 1.5 * tokens


@pytest.mark.parametrize(
    ("axis", "programs"),
    [
        (GridAxis(), 1),
        (GridAxis(axis="tokens"), 100),
        (GridAxis(axis="tokens", block=32), 4),
        (GridAxis(axis="rows", block=4, times=3), 9),
        (GridAxis(axis="tokens", block=64, times=2, plus="sequences"), 2 * (2 + 7)),
        (GridAxis(axis="splits"), 5),
    ],
)
def test_programs_of_a_grid(axis: GridAxis, programs: int) -> None:
    bucket = Bucket("mixed", tokens=100, sequences=7, rows=9, splits=5)
    assert grid_of((axis, GridAxis(), GridAxis(axis="sequences")), bucket) == (programs, 1, 7)


def variant(kind: Literal["decode", "any"], max_rows: int) -> CallVariant:
    return CallVariant(kind=kind, max_rows=max_rows, work=())


def bucket_of(kind: Literal["decode", "mixed"], tokens: int) -> Bucket:
    return Bucket(kind, tokens, min(tokens, 40), min(tokens, 40), 1)


SMALL, DECODE, REST = variant("any", 16), variant("decode", 64), variant("any", 5000)
CALL = CallLaunches(site="qkv", rows="tokens", variants=(SMALL, DECODE, REST))


def test_the_first_variant_that_is_right_for_the_bucket_runs() -> None:
    pick = Tactics().pick
    assert pick(CALL, bucket_of("decode", 16)) is SMALL
    assert pick(CALL, bucket_of("decode", 17)) is DECODE
    assert pick(CALL, bucket_of("mixed", 17)) is REST
    assert pick(CALL, bucket_of("decode", 65)) is REST
    logits = CallLaunches(site="x", rows="rows", variants=(SMALL, REST))
    assert pick(logits, Bucket("mixed", 4096, 1, 1, 1)) is SMALL


def test_a_tuned_variant_runs_where_it_was_measured_and_is_right() -> None:
    def tactic(kind: Literal["decode", "mixed"], rows: int, number: int) -> Tactic:
        return Tactic(
            sites=("qkv",),
            kind=kind,
            rows=rows,
            variant=number,
            microseconds=1.0,
            default_microseconds=2.0,
        )

    table = TacticTable(
        device="x",
        tactics=(tactic("decode", 8, 2), tactic("mixed", 32, 1), tactic("decode", 64, 9)),
    )
    pick = Tactics(table).pick
    assert pick(CALL, bucket_of("decode", 8)) is REST
    assert pick(CALL, bucket_of("decode", 4)) is SMALL, "measured for another bucket"
    assert pick(CALL, bucket_of("mixed", 32)) is REST, "a decode kernel never runs a mixed step"
    assert pick(CALL, bucket_of("decode", 64)) is DECODE, "there is no variant 9"
    other = CallLaunches(site="o", rows="tokens", variants=CALL.variants)
    assert pick(other, bucket_of("decode", 8)) is SMALL

"""Paged attention: against its reference, and bit for bit against itself in other batches."""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels import (
    KernelCall,
    KernelLibrary,
    assert_close,
    available_isas,
    compile_kernels,
)
from tests.support.operands import (
    Array,
    AttentionShape,
    History,
    attention_call,
    random_sequence,
)

SHAPES = {
    "gqa": AttentionShape("bf16", "bf16", 4, 2, 64, 16),
    "mha_f32": AttentionShape("f32", "f32", 3, 3, 24, 8),
    "mqa_fp8": AttentionShape("bf16", "f8e4m3", 8, 1, 64, 32, out_dtype="f8e4m3"),
    "mqa_i8": AttentionShape("bf16", "i8", 8, 1, 64, 32),
    "mqa_i4": AttentionShape("bf16", "u8", 8, 1, 64, 32),
    "window_i4": AttentionShape("f32", "u8", 6, 3, 40, 16, window=37, softcap=5.0),
    "head_128_i4": AttentionShape("bf16", "u8", 8, 2, 128, 16, sinks=True),
    "window_i8": AttentionShape("f32", "i8", 6, 3, 40, 16, window=37, softcap=5.0),
    "window": AttentionShape("bf16", "bf16", 6, 2, 80, 16, window=37),
    "wide_window_fp8": AttentionShape("f32", "f8e4m3", 4, 4, 96, 64, window=100),
    "softcap": AttentionShape("f32", "bf16", 4, 2, 256, 16, softcap=5.0),
    "window_softcap_i8": AttentionShape("bf16", "bf16", 4, 2, 32, 8, 64, 2.0, out_dtype="i8"),
    "head_128": AttentionShape("bf16", "bf16", 8, 2, 128, 16, out_dtype="i8"),
    "sinks": AttentionShape("bf16", "bf16", 8, 1, 64, 16, sinks=True),
    "sinks_window_f32": AttentionShape("f32", "f32", 6, 2, 32, 16, window=37, sinks=True),
    "chunks": AttentionShape("bf16", "bf16", 10, 2, 80, 16, window=37, chunked=1),
    "chunks_fp8": AttentionShape("f32", "f8e4m3", 4, 4, 32, 64, window=128, chunked=1),
    "group_of_7": AttentionShape("bf16", "bf16", 7, 1, 16, 16),
    "group_of_80": AttentionShape("f32", "f32", 80, 1, 8, 16),
}

# (new tokens, context): decodes and prefill chunks, on and beside borders of pages, blocks of 64
# keys, tiles of queries and spans of 512 keys.
MIXED = ((1, 1), (1, 17), (1, 64), (1, 65), (5, 5), (64, 64), (70, 200), (3, 515), (1, 1100))


@pytest.fixture(scope="module", params=available_isas())
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    return library_of(request.param)


@functools.cache
def library_of(isa: str) -> KernelLibrary:
    rng = np.random.default_rng(0)
    calls = [
        attention_call(rng, shape, [(random_sequence(rng, shape, 1), 1, 1)])
        for shape in SHAPES.values()
    ]
    return compile_kernels(calls, isa)


def histories(shape: AttentionShape, contexts: tuple[int, ...], seed: int = 3) -> list[History]:
    rng = np.random.default_rng(seed)
    return [random_sequence(rng, shape, context) for context in contexts]


def run(
    library: KernelLibrary,
    shape: AttentionShape,
    tails: list[tuple[History, int, int]],
    num_threads: int = 1,
    seed: int = 5,
) -> list[Array]:
    """Outputs of each sequence of a step, whose pages are scattered by `seed`."""
    call = attention_call(np.random.default_rng(seed), shape, tails)
    out = library.run(call, num_threads)["out"]
    return np.split(out, np.cumsum([new for _, new, _ in tails])[:-1])


@functools.cache
def mixed_batch(name: str) -> KernelCall:
    shape = SHAPES[name]
    tails = [
        (history, new, context)
        for history, (new, context) in zip(
            histories(shape, tuple(c for _, c in MIXED)), MIXED, strict=True
        )
    ]
    return attention_call(np.random.default_rng(1), shape, tails)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_mixed_batches_agree_with_the_reference(library, name, num_threads):
    call = mixed_batch(name)
    assert_close(call, library.run(call, num_threads))


@pytest.mark.parametrize("name", SHAPES)
def test_chunking_changes_no_bit(library, name):
    """From the first token on, and where a context grows beyond a span of 512 keys."""
    shape = SHAPES[name]
    (history,) = histories(shape, (600,))
    for borders in ((0, 1, 7, 64, 130, 131), (500, 501, 511, 513, 600)):
        first, last = borders[0], borders[-1]
        (whole,) = run(library, shape, [(history, last - first, last)], num_threads=2)
        chunks = [
            run(library, shape, [(history, end - begin, end)])[0]
            for begin, end in itertools.pairwise(borders)
        ]
        assert np.concatenate(chunks).tobytes() == whole.tobytes()


@pytest.mark.parametrize("name", SHAPES)
def test_batches_threads_and_pages_change_no_bit(library, name):
    shape = SHAPES[name]
    kinds = ((1, 90), (1, 1300), (40, 44), (1, 3))
    tails = [
        (history, new, context)
        for history, (new, context) in zip(
            histories(shape, tuple(c for _, c in kinds)), kinds, strict=True
        )
    ]
    together = run(library, shape, tails, num_threads=3)
    backwards = run(library, shape, tails[::-1], num_threads=2, seed=9)[::-1]
    for tail, one, other in zip(tails, together, backwards, strict=True):
        # One sequence on eight threads: a long context is split over them.
        (alone,) = run(library, shape, [tail], num_threads=8, seed=11)
        assert one.tobytes() == other.tobytes() == alone.tobytes()


@pytest.mark.parametrize("name", ["mqa_i8", "window_i8"])
def test_int8_keys_and_values_are_what_their_codes_and_scales_say(library, name):
    """As in a pool of f32 with their products: the largest of a head is 127 of its units."""
    shape = SHAPES[name]
    tails = [(one, 3, 90) for one in histories(shape, (90,))]
    rounded = []
    for history, new, context in tails:
        units = np.abs(history.kv).max(-1, keepdims=True) / 127
        rounded.append((History(history.q, np.rint(history.kv / units) * units), new, context))
    exact = replace(shape, pool_dtype="f32")
    expected = attention_call(np.random.default_rng(1), exact, rounded).reference()["out"]
    (found,) = run(library, shape, tails)
    np.testing.assert_allclose(
        found.astype(np.float32), expected.astype(np.float32), rtol=1 / 64, atol=1e-3
    )


@pytest.mark.parametrize("name", ["mqa_i4", "window_i4", "head_128_i4"])
def test_4_bits_are_what_their_codes_and_scales_say(library, name):
    """As in a pool of f32 of keys that are turned, rounded and turned back."""
    shape = SHAPES[name]
    tails = [(one, 3, 90) for one in histories(shape, (90,))]
    size = shape.head_dim & -shape.head_dim
    bits = np.arange(size)
    parity = np.array([[(i & j).bit_count() % 2 for j in bits.tolist()] for i in bits.tolist()])
    matrix = np.kron(np.eye(shape.head_dim // size), (1 - 2 * parity) / np.sqrt(size))
    rounded = []
    for history, new, context in tails:
        kv = np.stack([history.kv[:, 0] @ matrix, history.kv[:, 1]], axis=1)
        at = np.abs(kv).argmax(-1)[..., None]
        units = np.take_along_axis(kv, at, -1) / -8
        kv = np.clip(np.rint(kv / units), -8, 7) * units
        kv = np.stack([kv[:, 0] @ matrix, kv[:, 1]], axis=1).astype(np.float32)
        rounded.append((History(history.q, kv), new, context))
    exact = replace(shape, pool_dtype="f32")
    expected = attention_call(np.random.default_rng(1), exact, rounded).reference()["out"]
    (found,) = run(library, shape, tails)
    difference = np.abs(found.astype(np.float32) - expected.astype(np.float32))
    assert difference.max() < (0.02 if shape.dtype == "bf16" else 1e-4)
    assert difference.mean() < (2e-3 if shape.dtype == "bf16" else 1e-5)


@pytest.mark.parametrize("name", ["gqa", "window", "mqa_fp8", "mqa_i8", "mqa_i4"])
def test_later_tokens_of_a_chunk_are_not_seen(library, name):
    """Not even as 0 * NaN: a token's own bits stay when all that follows is NaN."""
    shape = SHAPES[name]
    (history,) = histories(shape, (150,))
    (clean,) = run(library, shape, [(history, 150, 150)])
    spoilt = History(history.q, history.kv.copy())
    spoilt.kv[101:] = np.nan
    (dirty,) = run(library, shape, [(spoilt, 150, 150)])
    assert dirty[:101].tobytes() == clean[:101].tobytes()
    assert np.isnan(dirty[101:].astype(np.float32)).all()


def test_tokens_before_the_window_are_not_seen(library):
    shape = SHAPES["window"]
    (history,) = histories(shape, (150,))
    (clean,) = run(library, shape, [(history, 50, 150)])
    spoilt = History(history.q, history.kv.copy())
    spoilt.kv[: 101 - shape.window] = np.nan
    (dirty,) = run(library, shape, [(spoilt, 50, 150)])
    assert dirty.tobytes() == clean.tobytes()


def test_a_sequence_without_new_tokens_is_skipped(library):
    shape = SHAPES["gqa"]
    history, idle = histories(shape, (20, 30))
    alone = run(library, shape, [(history, 4, 20)])
    beside = run(library, shape, [(idle, 0, 30), (history, 4, 20), (idle, 0, 30)])
    assert beside[1].tobytes() == alone[0].tobytes()


def test_large_scores_do_not_overflow(library):
    shape = SHAPES["mha_f32"]
    (history,) = histories(shape, (130,))
    loud = History(history.q * np.float32(1e3), history.kv * np.float32(1e3))
    call = attention_call(np.random.default_rng(0), shape, [(loud, 130, 130)])
    outputs = library.run(call)
    assert np.isfinite(outputs["out"]).all()
    assert_close(call, outputs)


tails_strategy = st.lists(
    st.integers(1, 180).flatmap(lambda c: st.tuples(st.integers(1, min(c, 80)), st.just(c))),
    min_size=1,
    max_size=5,
)


@settings(max_examples=40)
@given(
    kinds=tails_strategy,
    name=st.sampled_from(["gqa", "mha_f32", "window", "group_of_7"]),
    num_threads=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_batches(kinds, name, num_threads, seed):
    shape = SHAPES[name]
    contexts = tuple(context for _, context in kinds)
    tails = [
        (history, new, context)
        for history, (new, context) in zip(histories(shape, contexts, seed), kinds, strict=True)
    ]
    call = attention_call(np.random.default_rng(seed), shape, tails)
    best = library_of(available_isas()[-1])
    outputs = best.run(call, num_threads)
    assert_close(call, outputs)
    history, new, context = tails[-1]
    (alone,) = run(best, shape, [(history, new, context)], num_threads=1)
    assert outputs["out"][-new:].tobytes() == alone.tobytes()

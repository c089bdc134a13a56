"""Queries about a step's sequences find their own answers, whoever gives them, and whenever."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.masks import SomeTokens
from tests.support.requests import greedy_request
from trtc.protos.errors import TrtcError
from trtc.runtime.engine import mask_collector
from trtc.runtime.engine.mask_collector import Collected, MaskCollector
from trtc.runtime.engine.step_builder import MaskedRows
from trtc.runtime.requests.token_masks import (
    BothMasks,
    MaskQueries,
    MaskQuery,
    MaskSource,
    TokenEdit,
)
from trtc.runtime.sampling.masks import pack_mask, read_mask
from trtc.runtime.scheduling.sequence import Sequence as RunningSequence

VOCAB_SIZE = 70


@dataclass(eq=False)
class Shuffled:
    """Answers in an order of its own, in another thread; some of them from one block, some late."""

    seed: int
    late: int
    """Answers about this many are given when it is let."""
    gate: threading.Event = field(default_factory=threading.Event)
    num_lists: int = 0

    def begin(self, queries: MaskQueries) -> None:
        self.num_lists += 1
        threading.Thread(target=self._answer, args=(queries,)).start()

    def _answer(self, asked: MaskQueries) -> None:
        queries = list(asked)
        rng = np.random.default_rng(self.seed)
        block = np.zeros((len(queries), 3), np.uint32)
        order = rng.permutation(len(queries)).tolist()
        for place, row in enumerate(order):
            if place == len(order) - self.late:
                self.gate.wait(30)
            source = queries[row].source
            assert isinstance(source, Joint)
            if queries[row].drafts:
                queries[row].answer_each(_edits(queries[row], source.tokens))
                continue
            mask = source.tokens.allowed(queries[row].output_ids)
            if source.fails:
                queries[row].fail(RuntimeError(f"no {source.tokens.seed}"))
            elif place % 2:
                queries[row].answer(TokenEdit(mask, {source.tokens.seed: 0.5}))
            else:
                block[row] = read_mask(mask, VOCAB_SIZE)
                asked.answer_from(block.data, [(queries[row], row, 0)])


def _edits(query: MaskQuery, tokens: SomeTokens) -> Iterator[bytes]:
    for number in range(len(query.drafts) + 1):
        yield tokens.allowed([*query.output_ids, *query.drafts[:number]])


@dataclass(frozen=True, eq=False)
class Joint:
    """Of one request (implements JointMasks)."""

    tokens: SomeTokens
    answerer: Shuffled
    fails: bool = False
    takes_drafts: bool = True


def running(name: int, output: list[int], masks: MaskSource) -> RunningSequence:
    request = greedy_request(str(name), [1, 2], 40, masks=masks)
    sequence = RunningSequence(request, number=name, order=(0, 0, 0), eos_token_ids=frozenset())
    sequence.token_ids += output
    sequence.lanes = [name]
    return sequence


class Brief(SomeTokens):
    """Allows about half of the vocabulary, and after three tokens nothing: so it fails there."""

    def tokens(self, output_ids: Sequence[int]) -> NDArray[np.bool_]:
        key = [self.seed, *output_ids]
        return (len(output_ids) < 3) & (np.random.default_rng(key).random(self.vocab_size) < 0.5)


@given(
    kinds=st.lists(st.sampled_from(["alone", "joint", "both"]), min_size=1, max_size=6),
    lengths=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    drafts=st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=6, max_size=6),
    later=st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=6, max_size=6),
)
def test_rows_of_drafts_get_masks_up_to_the_first_that_is_forbidden(
    kinds: list[str], lengths: list[int], drafts: list[list[int]], later: list[list[int]]
) -> None:
    """Also where a sequence was asked about other drafts, and held since."""
    answerer = Shuffled(0, 0)
    rows, asked = list[MaskedRows](), list[MaskedRows]()
    expected, last_rows, first = dict[int, np.ndarray](), list[int](), 0
    for name, kind in enumerate(kinds):
        tokens, others = Brief(VOCAB_SIZE, name), Brief(VOCAB_SIZE, 50 + name)
        joint = Joint(tokens, answerer)
        source: MaskSource = tokens if kind == "alone" else joint
        source = BothMasks(others, joint) if kind == "both" else source
        parts = (tokens, others) if kind == "both" else (tokens,)
        output = [name] * lengths[name]
        sequence = running(name, output, source)
        asked.append(MaskedRows(sequence, first, 1 + len(drafts[name]), drafts[name]))
        rows.append(MaskedRows(sequence, first, 1 + len(later[name]), later[name]))
        masks = [np.all([one.tokens(output) for one in parts], axis=0)]
        for at, draft in enumerate(later[name]):
            longer = [*output, *later[name][: at + 1]]
            after = np.all([one.tokens(longer) for one in parts], axis=0)
            was_asked = later[name][: at + 1] == drafts[name][: at + 1]
            if not (was_asked and masks[-1][draft] and after.any()):
                last_rows.append(first + at)
                break
            masks.append(after)
        expected |= dict(enumerate(masks, first))
        first += rows[-1].number
    collector = MaskCollector(VOCAB_SIZE)
    collector.ask(asked)
    collected = collector.collect(rows, may_be_late=False)
    assert not collected.failures
    assert collected.masks is not None
    found = collected.masks.allowed(np.arange(len(collected.masks.rows)), VOCAB_SIZE)
    assert collected.masks.rows.tolist() == list(expected)
    assert np.array_equal(found, list(expected.values()))
    assert collected.last_rows == last_rows
    collector.close()


@given(
    kinds=st.lists(st.sampled_from(["alone", "joint", "both", "fails"]), min_size=1, max_size=8),
    forks=st.lists(st.integers(1, 3), min_size=8, max_size=8),
    seed=st.integers(0, 99),
    late=st.integers(0, 3),
)
def test_each_row_gets_its_own_mask(
    kinds: list[str], forks: list[int], seed: int, late: int
) -> None:
    answerer = Shuffled(seed, late)
    rows, expected = list[MaskedRows](), dict[int, np.ndarray]()
    first = 0
    for name, (kind, number) in enumerate(zip(kinds, forks, strict=False)):
        tokens, others = SomeTokens(VOCAB_SIZE, name), SomeTokens(VOCAB_SIZE, 50 + name)
        joint = Joint(tokens, answerer, fails=kind == "fails")
        source: MaskSource = tokens if kind == "alone" else joint
        output = [name] * (seed % 3)
        allowed = tokens.tokens(output)
        if kind == "both":
            source, allowed = BothMasks(others, joint), allowed & others.tokens(output)
        rows.append(MaskedRows(running(name, output, source), first, number))
        expected |= dict.fromkeys(range(first, first + number), allowed)
        first += number
    collector = MaskCollector(VOCAB_SIZE)
    collector.ask(rows)
    collector.ask(rows)  # what has been asked is not asked again
    collected = collector.collect(rows)
    held = [one for one in rows if one.sequence in collected.late]
    assert bool(collector.is_waiting) == bool(held)
    answerer.gate.set()
    check(rows, collected, expected, answerer)
    check(held, collector.collect(held, may_be_late=False), expected, answerer)
    assert answerer.num_lists == any(kind != "alone" for kind in kinds)
    assert not collector.is_waiting
    collector.close()


def check(
    rows: list[MaskedRows],
    collected: Collected,
    expected: dict[int, np.ndarray],
    answerer: Shuffled,
) -> None:
    """All but the late ones are there, in order, and right."""
    masked = list[int]()
    for sequence, first, number, _ in rows:
        if sequence in collected.late:
            continue
        source = sequence.request.masks
        is_empty = not expected[first].any()
        if sequence in collected.failures:
            assert is_empty or (isinstance(source, Joint) and source.fails)
            continue
        assert not is_empty
        masked += range(first, first + number)
    found = collected.masks
    assert (found is None) == (not masked)
    if found is not None:
        assert found.rows.tolist() == masked
        allowed = found.allowed(np.arange(len(masked)), VOCAB_SIZE)
        assert np.array_equal(allowed, [expected[row] for row in masked])


def test_biases_of_both_masks_are_added_up() -> None:
    class Nudges(SomeTokens):
        def allowed(self, output_ids: Sequence[int]) -> TokenEdit:  # type: ignore[override]
            return TokenEdit(None, {3: 1.0, self.seed: 2.0})

    both = BothMasks(Nudges(VOCAB_SIZE, 4), BothMasks(Nudges(VOCAB_SIZE, 5), Nudges(VOCAB_SIZE, 5)))
    rows = [MaskedRows(running(0, [], both), 0, 2)]
    collector = MaskCollector(VOCAB_SIZE)
    collected = collector.collect(rows, may_be_late=False)
    assert collected.masks is None
    assert collected.biases == {row: {3: 3.0, 4: 2.0, 5: 4.0} for row in (0, 1)}
    collector.close()


def test_an_answer_after_its_sequence_went_on_is_dropped() -> None:
    """It is asked about again, and that answer counts."""
    answerer = Shuffled(0, late=1)
    tokens = SomeTokens(VOCAB_SIZE, 1)
    sequence = running(0, [5], Joint(tokens, answerer))
    rows = [MaskedRows(sequence, 0, 1)]
    collector = MaskCollector(VOCAB_SIZE)
    collector.ask(rows)
    sequence.token_ids.append(6)
    collector.ask(rows)
    answerer.gate.set()
    masks = collector.collect(rows, may_be_late=False).masks
    assert masks is not None
    assert masks.words.tobytes() == read_mask(pack_mask(tokens.tokens([5, 6])), 70).tobytes()
    collector.close()


def test_a_wrong_answer_fails_its_query() -> None:
    class Wrong(SomeTokens):
        def allowed(self, output_ids: Sequence[int]) -> bytes:
            return "no mask"  # type: ignore[return-value]

    sequence = running(0, [], Wrong(VOCAB_SIZE))
    collector = MaskCollector(VOCAB_SIZE)
    failures = collector.collect([MaskedRows(sequence, 0, 1)], may_be_late=False).failures
    with pytest.raises(TrtcError, match="masks: gave 7 bytes for a row"):
        raise failures[sequence]
    collector.close()


@pytest.mark.parametrize("has_others", [True, False])
def test_a_step_waits_for_its_first_mask_only_if_it_has_nothing_else_to_draw(
    has_others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(SomeTokens):
        def allowed(self, output_ids: Sequence[int]) -> bytes:
            time.sleep(0.05)
            return super().allowed(output_ids)

    monkeypatch.setattr(mask_collector, "_GRACE_S", 0.0)
    monkeypatch.setattr(mask_collector, "_FIRST_MASK_S", 60.0)
    sequence = running(0, [], Slow(VOCAB_SIZE, 1))
    collector = MaskCollector(VOCAB_SIZE)
    free_s = 0.0 if has_others else None
    collected = collector.collect([MaskedRows(sequence, 0, 1)], free_s=free_s)
    assert collected.late == ([sequence] if has_others else [])
    collector.close()

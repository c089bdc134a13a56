"""Drafts: fewer steps, the same tokens, whatever is proposed."""

import random
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as with_fields

from tests.runtime.engine.test_run_ahead import TINY_TEXT, draw_request
from tests.support.drafts import Guesser
from tests.support.driver import Driver, greedy_outputs, solo_outputs
from tests.support.lazy import LazyEcho
from tests.support.loops import Loop, running_loop
from tests.support.masks import SomeTokens
from tests.support.requests import greedy_request
from trtc.protos.errors import RequestError, UnsupportedError
from trtc.runtime.engine import mask_collector
from trtc.runtime.engine.drafting import DraftConfig, lookup
from trtc.runtime.engine.loop import LoopConfig
from trtc.runtime.executors.base import DraftRows
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.requests.completion import Completion
from trtc.runtime.requests.request import GenerationRequest
from trtc.runtime.sampling.sampler import NO_DRAFT, Int32s, counted
from trtc.runtime.scheduling.sequence import Sequence

ROOMY = EchoOptions(vocab_size=64, num_pages=600)


class Knowing(Guesser):
    """Drafts all that is asked for, and rightly."""

    def propose(self, sequence: Sequence, history: Int32s, most: int) -> Items[int]:
        return self.answer(sequence)[sequence.num_output : sequence.num_output + most]


@pytest.mark.parametrize(
    ("kind", "num_plain"),
    [(EchoExecutor, 1), pytest.param(LazyEcho, 2, id="ahead of the first token")],
)
@pytest.mark.parametrize("masks", [None, SomeTokens(64)])
def test_right_drafts_save_steps(
    masks: SomeTokens | None,
    kind: type[EchoExecutor],
    num_plain: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mask_collector, "_GRACE_S", 60.0)
    executor = kind(ROOMY)
    loop = Loop(executor, None, LoopConfig(drafts=DraftConfig(num_tokens=4)))
    loop._pipeline._drafter = Knowing(ROOMY)
    request = greedy_request("r", [1, 2, 3], 21, masks=masks)
    inbox = loop.send(request)
    loop.start()
    tokens = inbox.result().completions[0].token_ids
    loop.stop()
    (expected,) = solo_outputs(request, ROOMY)
    assert list(tokens) == expected
    assert masks or tokens == EchoExecutor(ROOMY).greedy([1, 2, 3], 21)
    assert executor.num_steps == num_plain + 20 / 5
    stats = loop.stats()
    assert stats.draft_tokens == stats.accepted_draft_tokens == 21 - executor.num_steps
    assert stats.generated_tokens == 21


class Picky(Knowing):
    """Knows the answers to one prompt alone."""

    def propose(self, sequence: Sequence, history: Int32s, most: int) -> Items[int]:
        return super().propose(sequence, history, most) if sequence.num_prompt == 1 else ()


def test_who_has_drafts_waits_alone_while_most_run_ahead() -> None:
    driver = Driver(ROOMY, ahead=True, drafter=Picky(ROOMY))
    for number in range(4):
        driver.submit(greedy_request(f"r{number}", [1] * (1 + number), 40))
    num_steps = driver.run()
    assert num_steps == 40
    assert isinstance(driver.executor, LazyEcho)
    assert driver.executor.num_ahead == 39
    assert driver.state.counters.accepted_tokens == 30, "38 tokens in 8 steps"
    for number in range(4):
        expected = greedy_outputs([1] * (1 + number), 40, ROOMY)
        assert driver.outputs(f"r{number}") == [expected]


def test_sequences_with_drafts_share_their_steps() -> None:
    """Those that came by turns are not computed by turns."""
    driver = Driver(ROOMY, ahead=True, drafter=Knowing(ROOMY))
    for number in range(3):
        driver.submit(greedy_request(f"r{number}", [1 + number], 200))
        for _ in range(4 + number):
            driver.step()
    for _ in range(10):
        step_plan = driver.step()
        assert [chunk.num_drafts for chunk in step_plan.chunks] == [4, 4, 4]


def test_drafts_say_nothing_of_how_fast_prompts_are_computed() -> None:
    """Steps of drafts measure memory bandwidth, as decodes do."""
    options = replace(ROOMY, draft_rows=DraftRows(64, as_sequences=True))
    executor = LazyEcho(options)
    loop = Loop(executor, None, LoopConfig(drafts=DraftConfig()))
    loop._pipeline._drafter = Knowing(options)
    inboxes = [loop.send(greedy_request(f"r{number}", [number], 42)) for number in range(8)]
    loop.start()
    for inbox in inboxes:
        inbox.result()
    loop.stop()
    assert executor.num_steps == 2 + 40 / 5
    assert loop._pace.limits.max_tokens_beside_decodes is None


@pytest.mark.parametrize(("most", "expected"), [(4, [1]), (5, [2]), (64, [4, 4, 4])])
def test_drafts_find_room_in_rows_that_nobody_needs(most: int, expected: list[int]) -> None:
    options = replace(ROOMY, draft_rows=DraftRows(most, as_sequences=True), max_batch_size=4)
    driver = Driver(options, drafter=Knowing(options))
    for number in range(3):
        driver.submit(greedy_request(f"r{number}", [1 + number], 50))
    driver.step()
    drafts = [chunk.num_drafts for chunk in driver.step().chunks]
    assert drafts == [*expected, 0, 0][:3]
    # A row that a fourth may need is not a draft's.
    driver.submit(greedy_request("late", [7], 50))
    chunks = driver.step().chunks
    assert len(chunks) == 4
    assert sum(chunk.num_drafts for chunk in chunks) == max(0, min(most - 4, 12))


def test_states_are_drafted_as_far_as_pages_go() -> None:
    """Of nine pages of four tokens one to four hold keys and values, one or two states; each row
    with drafts wants one of the others, and where it begins a page of tokens two more."""
    options = replace(
        ROOMY, windows=(None, 0), page_size=4, num_pages=9, max_seq_len=16, max_batch_size=2
    )
    driver = Driver(options, prefix_cache=False, drafter=Knowing(options))
    driver.submit(greedy_request("r", [1], 15))
    drafts: list[int] = []
    while driver.is_busy:
        drafts += [chunk.num_drafts for chunk in driver.step().chunks]
        driver.state.check_integrity()
    assert driver.outputs("r") == [greedy_outputs([1], 15, options)]
    assert drafts == [0, 4, 2, 2, 2]
    assert driver.state.cache.pool.num_free == 9


def completions(
    requests: list[GenerationRequest], options: EchoOptions, *, drafts: bool, ahead: bool = False
) -> tuple[list[tuple[Completion, ...]], int]:
    """What requests that arrive together are told, and the drafts that were accepted."""
    config = LoopConfig(eos_token_ids=(5,), drafts=DraftConfig() if drafts else None)
    with running_loop(options, config, text=True, ahead=ahead) as loop:
        if drafts:
            loop._pipeline._drafter = Guesser(options)
        inboxes = [loop.send(request) for request in requests]
        told = [inbox.result().completions for inbox in inboxes]
        return told, loop.stats().accepted_draft_tokens


@pytest.mark.parametrize(
    ("windows", "as_sequences"), [((None,), False), ((None, 0), False), ((None, 0), True)]
)
@pytest.mark.parametrize("ahead", [False, True])
def test_requests_are_told_the_same_as_without_drafts(
    ahead: bool, windows: tuple[int | None, ...], as_sequences: bool
) -> None:
    """Stop strings inside of accepted drafts, penalties, log-probabilities, forks, preemptions."""
    rng = random.Random(7)
    requests = [draw_request(number, rng, text=True) for number in range(40)]
    num_pages = TINY_TEXT.num_pages * len(windows)
    options = replace(TINY_TEXT, windows=windows, num_pages=num_pages)
    plain, _ = completions(requests, options, drafts=False)
    rows = DraftRows(16, as_sequences=as_sequences)
    options = replace(options, accepts_at_random=True, draft_rows=rows)
    drafted, accepted = completions(requests, options, drafts=True, ahead=ahead)
    assert drafted == plain
    assert accepted > 0
    assert any(one.matched_stop for told in drafted for one in told)


@pytest.mark.parametrize("seed", range(2))
def test_ngram_drafts_change_no_token(seed: int) -> None:
    """Three tokens that mean different things by all that was before: most drafts are wrong."""
    options = EchoOptions(vocab_size=3, num_pages=40, page_size=4, max_batch_size=6)
    rng = random.Random(seed)
    requests = [
        with_fields(greedy_request(f"r{at}", [rng.randrange(3)] * rng.randint(1, 9), 60), n=1)
        for at in range(12)
    ]
    with running_loop(options, LoopConfig(drafts=DraftConfig())) as loop:
        inboxes = [loop.send(request) for request in requests]
        for request, inbox in zip(requests, inboxes, strict=True):
            told = list(inbox.result().completions[0].token_ids)
            assert told == list(EchoExecutor(options).greedy(request.prompt_ids, 60))
        stats = loop.stats()
    assert stats.draft_tokens > stats.accepted_draft_tokens > 0


def test_what_cannot_be_drafted_is_refused_by_name() -> None:
    config = LoopConfig(drafts=DraftConfig())
    with pytest.raises(UnsupportedError, match=r"^draft: this engine checks no drafts"):
        Loop(EchoExecutor(replace(ROOMY, draft_rows=None)), None, config)
    for number in (0, 16):
        config = LoopConfig(drafts=DraftConfig(num_tokens=number))
        with pytest.raises(RequestError, match=r"^draft_tokens: is .* Give 1 to 15"):
            Loop(EchoExecutor(ROOMY), None, config)


@given(tokens=st.lists(st.integers(0, 2) | st.just(256), max_size=40), most=st.integers(1, 9))
def test_drafts_are_what_followed_the_last_tokens_before(tokens: list[int], most: int) -> None:
    expected: list[int] = []
    for length in (2, 3, 4):
        end = tokens[-length:]
        places = [
            at
            for at in range(len(tokens) - length)
            if len(end) == length and tokens[at : at + length] == end
        ]
        if places:
            known = list(tokens)
            for step in range(most):
                known.append(known[places[-1] + length + step])
            expected = known[len(tokens) :]
    assert lookup(np.array(tokens, np.int32), most) == expected


@given(data=st.data())
def test_rows_count_up_to_the_first_wrong_draft(data: st.DataObject) -> None:
    token_ids, drafts, expected = [], [], []
    for number in data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6)):
        is_right = True
        for _ in range(number):
            token, draft = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))
            token_ids.append(token)
            drafts.append(draft)
            expected.append(is_right)
            is_right = is_right and token == draft
        token_ids.append(data.draw(st.integers(0, 1)))
        drafts.append(NO_DRAFT)
        expected.append(is_right)
    found = counted(np.array(token_ids, np.int32), np.array(drafts, np.int32))
    assert found.tolist() == expected

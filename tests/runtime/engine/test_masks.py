"""Masks that requests bring: kept to whatever else runs, and waited for alone."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from msgspec.structs import replace as with_fields

from tests.support.loops import running_loop
from tests.support.masks import SomeTokens
from tests.support.requests import greedy_request, sampled_request
from trtc.protos.errors import InvalidRequestError
from trtc.protos.sampling import SamplingParams
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions, context_state
from trtc.runtime.requests.request import GenerationRequest
from trtc.runtime.requests.token_masks import TokenEdit
from trtc.runtime.sampling.masks import pack_mask

TINY = EchoOptions(
    vocab_size=64, num_pages=14, page_size=4, max_batch_size=5, max_seq_len=48, max_num_tokens=10
)
ROOMY = EchoOptions(vocab_size=64, num_pages=600)


def greedy(request: GenerationRequest, masks: SomeTokens) -> list[int]:
    """The likeliest allowed tokens, one by one, from the echo function itself."""
    echo = EchoExecutor(ROOMY)
    tokens = list(request.prompt_ids)
    for _ in range(request.max_tokens):
        logits = echo._logits_of(np.array([context_state(np.array(tokens))], np.uint64))[0]
        allowed = masks.tokens(tokens[len(request.prompt_ids) :])
        tokens.append(int(np.where(allowed, logits, -np.inf).argmax()))
    return tokens[len(request.prompt_ids) :]


@pytest.mark.parametrize("ahead", [False, True])
def test_greedy_tokens_are_the_likeliest_of_those_allowed(ahead: bool) -> None:
    """In a crowded pool, beside requests without masks."""
    masked = [
        greedy_request(f"m{seed}", [1 + seed % 3] * (3 + seed), 20, masks=SomeTokens(64, seed))
        for seed in range(10)
    ]
    plain = [greedy_request(f"p{seed}", [seed] * 5, 20) for seed in range(5)]
    with running_loop(TINY, ahead=ahead) as loop:
        inboxes = [loop.send(request) for request in (*masked, *plain)]
        told = [list(inbox.result().completions[0].token_ids) for inbox in inboxes]
        assert loop.stats().preemptions > 0
    for request, tokens in zip(masked, told, strict=False):
        assert isinstance(request.masks, SomeTokens)
        assert tokens == greedy(request, request.masks)
    for request, tokens in zip(plain, told[len(masked) :], strict=True):
        assert tokens == list(EchoExecutor(ROOMY).greedy(request.prompt_ids, 20))


@pytest.mark.parametrize("ahead", [False, True])
def test_drawn_tokens_are_allowed_and_the_same_alone(ahead: bool) -> None:
    requests = [
        GenerationRequest(
            f"r{seed}",
            (1, 2, 3),
            SamplingParams(
                temperature=(0.7, 1.0)[seed % 2],
                top_k=(0, 3)[seed % 2],
                top_p=(1.0, 0.8, 1.0)[seed % 3],
                presence_penalty=(0.0, 0.9)[seed % 2],
                logit_bias={5: 100.0},
                seed=seed,
            ),
            max_tokens=12,
            n=(1, 3)[seed % 2],
            logprobs=(None, 2)[seed % 2],
            masks=SomeTokens(64, seed),
        )
        for seed in range(6)
    ]
    with running_loop(TINY, ahead=ahead) as loop:
        inboxes = [loop.send(request) for request in requests]
        together = [inbox.result().completions for inbox in inboxes]
    for request, completions in zip(requests, together, strict=True):
        with running_loop(ROOMY) as loop:
            alone = loop.send(request).result().completions
        assert [one.token_ids for one in completions] == [one.token_ids for one in alone]
        assert isinstance(request.masks, SomeTokens)
        for completion in completions:
            for at, token in enumerate(completion.token_ids):
                assert request.masks.tokens(completion.token_ids[:at])[token]


class Gated(SomeTokens):
    """Answers about the third token, and only about that, when it is let."""

    def __init__(self) -> None:
        super().__init__(vocab_size=64)
        object.__setattr__(self, "asked", threading.Event())
        object.__setattr__(self, "gate", threading.Event())

    asked: threading.Event
    gate: threading.Event

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        if len(output_ids) == 2:
            self.asked.set()
            assert self.gate.wait(30)
        return super().allowed(output_ids)


@pytest.mark.parametrize("windows", [(None,), (None, 0)])
@pytest.mark.parametrize("ahead", [False, True])
def test_who_awaits_a_mask_waits_alone(ahead: bool, windows: tuple[int | None, ...]) -> None:
    options, masks = replace(ROOMY, windows=windows), Gated()
    request = sampled_request("late", [1, 2], 8, masks=masks)
    with running_loop(options, ahead=ahead) as loop:
        late = loop.send(request)
        assert masks.asked.wait(30)
        others = [loop.send(greedy_request(f"r{i}", [i], 40)) for i in range(3)]
        for inbox in others:
            inbox.result()
        assert not late.ended.is_set()
        masks.gate.set()
        tokens = late.result().completions[0].token_ids
    with running_loop(options) as loop:
        alone = loop.send(with_fields(request, masks=SomeTokens(64))).result().completions[0]
    assert tokens == alone.token_ids


@pytest.mark.parametrize("ahead", [False, True])
def test_a_late_mask_is_waited_for_where_no_page_keeps_the_state_before(ahead: bool) -> None:
    """Six tokens and their states take the four pages that are left."""
    options = replace(ROOMY, windows=(None, 0), page_size=4, num_pages=6, max_seq_len=12)
    masks = Gated()
    request = sampled_request("late", [1, 2, 3, 4], 8, masks=masks)
    with running_loop(options, ahead=ahead) as loop:
        held = loop._state.cache.allocate(2)
        late = loop.send(request)
        assert masks.asked.wait(30)
        time.sleep(0.05)  # longer than a step waits elsewhere
        assert not any(one.is_held for one in loop._state.running)
        loop._state.cache.release(held)
        masks.gate.set()
        tokens = late.result().completions[0].token_ids
    with running_loop(replace(options, num_pages=60)) as loop:
        alone = loop.send(with_fields(request, masks=SomeTokens(64))).result().completions[0]
    assert tokens == alone.token_ids


def test_a_request_can_end_while_it_awaits_its_mask() -> None:
    masks = Gated()
    with running_loop(ROOMY) as loop:
        late = loop.send(greedy_request("late", [1, 2], 8, masks=masks))
        assert masks.asked.wait(30)
        loop.abort("late")
        assert len(late.result().completions[0].token_ids) == 2
        masks.gate.set()


@dataclass(frozen=True)
class Nudged:
    """Adds to the logits of two tokens, of which after two tokens it allows one alone."""

    def edit(self, output_ids: Sequence[int]) -> TokenEdit:
        first = 7 * len(output_ids) % 64
        bias = {first: 6.0, (first + 1) % 64: 7.0}
        mask = np.arange(64) != (first + 1) % 64
        return TokenEdit(pack_mask(mask) if len(output_ids) >= 2 else None, bias)

    def allowed(self, output_ids: Sequence[int]) -> bytes | TokenEdit:
        return self.edit(output_ids)


@pytest.mark.parametrize("ahead", [False, True])
def test_biases_of_a_mask_are_added_to_the_logits_and_to_the_request_s_own(ahead: bool) -> None:
    own = {token: 4.0 - token / 16 for token in range(0, 64, 3)}
    request = GenerationRequest(
        "r", (1, 2), SamplingParams(temperature=0.0, logit_bias=own), 12, masks=Nudged()
    )
    with running_loop(ROOMY, ahead=ahead) as loop:
        plain = loop.send(greedy_request("plain", [5], 12))
        told = loop.send(request).result().completions[0].token_ids
        assert plain.result().completions[0].token_ids == EchoExecutor(ROOMY).greedy([5], 12)
    echo, tokens = EchoExecutor(ROOMY), list(request.prompt_ids)
    for at in range(request.max_tokens):
        logits = echo._logits_of(np.array([context_state(np.array(tokens))], np.uint64))[0].copy()
        edit = Nudged().edit(tokens[2:])
        for bias in (own, edit.bias):
            for token, value in bias.items():
                logits[token] += np.float32(value)
        if at >= 2:
            logits[(7 * at + 1) % 64] = -np.inf
        tokens.append(int(logits.argmax()))
    assert list(told) == tokens[2:]


class Wrong:
    """Masks that fail after two tokens."""

    def __init__(self, mask: bytes | TokenEdit | None) -> None:
        self._mask = mask

    def allowed(self, output_ids: Sequence[int]) -> bytes | TokenEdit:
        if len(output_ids) < 2:
            return b"\xff" * 8
        if self._mask is None:
            raise RuntimeError("no such state")
        return self._mask


@pytest.mark.parametrize("windows", [(None,), (None, 0)])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        (None, "masks: raised RuntimeError: no such state"),
        (bytes(8), "masks: allow no token"),
        (bytes(9), "masks: gave 9 bytes for a row"),
        (TokenEdit(bias={64: 1.0}), "masks: gave token 64 the bias 1. Give tokens from 0 to 63"),
        (TokenEdit(bias={3: float("nan")}), "masks: gave token 3 the bias nan"),
        (TokenEdit(bias={3: 101.0}), "masks: gave token 3 the bias 101"),
    ],
)
def test_masks_that_fail_end_their_request_alone(
    mask: bytes | TokenEdit | None, problem: str, ahead: bool, windows: tuple[int | None, ...]
) -> None:
    options = replace(ROOMY, windows=windows)
    with running_loop(options, ahead=ahead) as loop:
        wrong = loop.send(sampled_request("wrong", [1], 9, n=2, masks=Wrong(mask)))
        right = loop.send(greedy_request("right", [2], 9))
        assert isinstance(wrong.wait().error, InvalidRequestError)
        assert str(wrong.error).startswith(problem)
        told = [sum(len(one.token_ids) for one in wrong.outputs if one.index == i) for i in (0, 1)]
        # One that awaits its mask waits alone: the other may fail before its second token.
        assert max(told) == 2
        assert right.result().completions[0].token_ids == EchoExecutor(options).greedy([2], 9)


def test_masks_are_computed_while_the_step_runs() -> None:
    class Meeting(EchoExecutor):
        """Computes logits only when a mask is being computed."""

        def logits(self, batch):  # type: ignore[no-untyped-def]
            assert masks.asked.wait(30), "nobody asked for the mask before the forward pass"
            masks.gate.set()
            return super().logits(batch)

    class FromTheStart(Gated):
        def allowed(self, output_ids: Sequence[int]) -> bytes:
            return super().allowed([0, 0]) if not output_ids else SomeTokens(64).allowed(output_ids)

    masks = FromTheStart()
    with running_loop(executor=Meeting(ROOMY)) as loop:
        assert len(loop.send(greedy_request("r", [1], 3, masks=masks)).result().completions) == 1

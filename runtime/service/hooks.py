"""An operator's hooks, where a request passes: its input, its prompt, its draws, its outputs.

    request input -> on_request -> tokenise -> on_prompt -> engine -> outputs -> on_output -> client
                                                      └── logits_processor, in the mask collector

An engine never waits for a hook: hooks run in separate processes (runtime/hooks), and if the edit
of a token's logits is late, the step goes on without that sequence.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
from msgspec.structs import replace

from trtc.protos.errors import HookError, RequestError, TrtcError
from trtc.protos.sampling import SamplingOptions
from trtc.runtime.engine.config import EngineConfig, EngineSource, Opener
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.hooks.calls import Edit, Edited, HookCalls
from trtc.runtime.hooks.contract import (
    LogitsEdit,
    Message,
    NewOutput,
    Parameters,
    Request,
    RequestInfo,
    Stop,
)
from trtc.runtime.hooks.lanes import failed
from trtc.runtime.requests.principal import Principal
from trtc.runtime.requests.request import FinishReason, Output
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.token_masks import (
    JointMasks,
    MaskQueries,
    MaskQuery,
    TokenEdit,
)
from trtc.runtime.requests.validation import MAX_BIAS
from trtc.runtime.sampling.masks import pack_mask

_SAMPLING = frozenset(SamplingOptions.__annotations__)


def hooked_opener(opener: Opener, calls: HookCalls) -> Opener:
    """An opener that raises RequestError for engines that do not support the server's hooks."""

    def open_checked(source: EngineSource, config: EngineConfig) -> EngineHandle:
        handle = opener(source, config)
        try:
            _check_engine(calls, handle)
        except RequestError:
            handle.loop.stop()
            handle.close()
            raise
        return handle

    return open_checked


def _check_engine(calls: HookCalls, handle: EngineHandle) -> None:
    if "logits_processor" not in calls.methods:
        return
    if not any(group.is_state for group in handle.manifest.kv.groups):
        return
    raise RequestError(
        f"logits_processor is not possible: engine {handle.name} has recurrent states, so that all "
        "sequences of a step would wait for a late hook while the KV pool is full",
        field="--hooks",
        remedy="Give a class without logits_processor, or serve another engine",
    )


class HookedRequest:
    """The hooks of one request."""

    def __init__(
        self, calls: HookCalls, model: str, request_input: RequestInput, principal: Principal
    ) -> None:
        self._calls = calls
        self._lane = calls.lane()
        self._input = replace(
            request_input, request_id=request_input.request_id or uuid.uuid4().hex
        )
        self._info = RequestInfo(self._input.request_id, model, principal.tenant)
        self._edits_logits = "logits_processor" in calls.methods

    async def on_request(self) -> RequestInput:
        """The request input, as the hook wants it.

        Raises:
            ForbiddenError, HookError: see `HookCalls.call`. All methods raise these.
        """
        request_input = self._input
        given = await self._call("on_request", _request_of(request_input, self._info))
        if given is None:
            return request_input
        self._edits_logits = self._edits_logits and given.edits_logits
        return replace(
            request_input,
            sampling=_sampling_of(given.sampling),
            max_tokens=given.max_tokens,
            min_tokens=given.min_tokens,
            stop=given.stop,
            stop_token_ids=given.stop_token_ids,
            ignore_eos=given.ignore_eos,
            priority=given.priority,
            cache_salt=given.cache_salt,
        )

    async def on_prompt(
        self, request_input: RequestInput, token_ids: tuple[int, ...]
    ) -> RequestInput:
        """The input with `token_ids` as its prompt, or with those that the hook returns."""
        given = await self._call("on_prompt", token_ids)
        if given is None:
            return request_input
        return replace(request_input, text=None, token_ids=tuple(given))

    def masks(self, vocab_size: int) -> JointMasks | None:
        """The masks that call logits_processor, if it is enabled for the request; else None."""
        if not self._edits_logits:
            return None
        return _Edits(_Answerer(self._calls), self._lane, self._info, vocab_size)

    def outputs(self, num_sequences: int, abort: Callable[[], object]) -> "OutputHook | None":
        """A filter that passes outputs through on_output; None: there is no such hook.

        Args:
            abort: ends the request.
        """
        if "on_output" not in self._calls.methods:
            return None
        return OutputHook(self, num_sequences, abort)

    async def on_output(self, output: Output) -> str | Stop | None:
        reason = output.finish_reason
        seen = NewOutput(output.index, output.text, output.token_ids, reason and reason.value)
        return cast(str | Stop | None, await self._call("on_output", seen))

    async def _call(self, method: str, argument: Any) -> Any:
        arguments = (argument,) if method == "on_request" else (self._info, argument)
        return await self._calls.call(self._lane, method, self._info.request_id, *arguments)


@dataclass(frozen=True)
class _Edits:
    """Logits edits of a hook (implements JointMasks)."""

    answerer: "_Answerer"
    lane: int
    info: RequestInfo
    vocab_size: int

    @property
    def takes_drafts(self) -> bool:
        """False: a call for each draft costs more than a step."""
        return False

    def token_edit(self, edit: LogitsEdit) -> TokenEdit:
        """Convert an edit of a hook.

        Raises:
            HookError: the edit is invalid.
        """
        allowed = None if edit.allowed is None else list(edit.allowed)
        tokens = [*(allowed or ()), *edit.bias]
        if allowed == [] or not all(0 <= one < self.vocab_size for one in tokens):
            raise failed("logits_processor", "allows no token, or names one that there is not")
        if not all(-MAX_BIAS <= one <= MAX_BIAS for one in edit.bias.values()):
            raise failed("logits_processor", f"gave a bias beyond {MAX_BIAS:g}")
        if allowed is None:
            return TokenEdit(bias=edit.bias)
        mask = np.zeros(self.vocab_size, np.bool_)
        mask[allowed] = True
        return TokenEdit(pack_mask(mask), edit.bias)


@dataclass(frozen=True)
class _Answerer:
    """Calls logits_processor for all sequences of a step (implements MaskAnswerer). All instances
    of a server are equal."""

    calls: HookCalls

    def begin(self, queries: MaskQueries) -> None:
        edits = []
        for query in queries:
            source = cast(_Edits, query.source)
            edits.append(Edit(source.lane, source.info, query.output_ids, query))
        self.calls.begin_edits(edits, partial(_settle, queries))


def _settle(queries: MaskQueries, ended: Sequence[Edited]) -> None:
    queries.answer_unmasked([edit.asker for edit, given in ended if given is None])
    for edit, given in ended:
        if given is not None:
            _answer(edit.asker, given)


def _answer(query: MaskQuery, given: LogitsEdit | TrtcError) -> None:
    if isinstance(given, TrtcError):
        query.fail(given)
        return
    try:
        query.answer(cast(_Edits, query.source).token_edit(given))
    except HookError as error:
        query.fail(error)


class OutputHook:
    """Passes the outputs of one request through on_output."""

    def __init__(
        self, request: HookedRequest, num_sequences: int, abort: Callable[[], object]
    ) -> None:
        self._request = request
        self._running = set(range(num_sequences))
        self._stopped: set[int] = set()
        """Sequences that the hook ended; the request is aborted when all have ended."""
        self._abort = abort

    async def __call__(self, outputs: Sequence[Output]) -> list[Output]:
        """The outputs for the reader in place of these; possibly none."""
        return [edited for output in outputs for edited in await self._edited(output)]

    async def _edited(self, output: Output) -> list[Output]:
        is_last = output.finish_reason is not None or output.usage is not None
        if output.index in self._stopped:
            return [_ended(output, "")] if is_last else []
        if not (output.token_ids or output.text or is_last):
            return [output]  # log-probabilities of the prompt
        given = await self._request.on_output(output)
        if output.finish_reason is not None:
            self._running.discard(output.index)
        if isinstance(given, Stop):
            return [self._stop(output, given.text)]
        return [output if given is None or given == output.text else _edited(output, given)]

    def _stop(self, output: Output, text: str) -> Output:
        if output.finish_reason is not None:
            return _ended(output, text)
        self._stopped.add(output.index)
        self._running.discard(output.index)
        if not self._running:
            self._abort()
        return _edited(output, text)


def _edited(output: Output, text: str) -> Output:
    """The output with another text, without token ids and log-probabilities, which would reveal
    what the hook has removed."""
    return replace(output, text=text, token_ids=(), logprobs=())


def _ended(output: Output, text: str) -> Output:
    return replace(_edited(output, text), finish_reason=FinishReason.STOP, matched_stop="")


def _request_of(request_input: RequestInput, info: RequestInfo) -> Request:
    return Request(
        info=info,
        parameters=Parameters(
            sampling=cast(Mapping[str, Any], request_input.sampling),
            max_tokens=request_input.max_tokens,
            min_tokens=request_input.min_tokens,
            stop=request_input.stop,
            stop_token_ids=request_input.stop_token_ids,
            ignore_eos=request_input.ignore_eos,
            priority=request_input.priority,
            cache_salt=request_input.cache_salt,
        ),
        text=request_input.text,
        token_ids=request_input.token_ids,
        messages=None
        if request_input.chat is None
        else tuple(
            Message(one.role, one.content or "".join(part.text for part in one.parts))
            for one in request_input.chat.messages
        ),
        n=request_input.n,
    )


def _sampling_of(given: Mapping[str, Any]) -> SamplingOptions:
    """Check the sampling parameters of a hook.

    Raises:
        HookError: a parameter is unknown or has another type.
    """
    for name, value in given.items():
        if name not in _SAMPLING or isinstance(value, dict) != (name == "logit_bias"):
            raise failed("on_request", f"gave a wrong sampling parameter: {name[:100]!r}")
    return cast(SamplingOptions, dict(given))

"""Hooks of servers under test, which import them in processes of their own."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace

from trtc.hooks import LogitsEdit, NewOutput, Parameters, Refused, Request, RequestInfo, Stop


def _misbehave(word: str) -> None:
    """What a request's id asks for."""
    if word == "raise":
        raise RuntimeError("a secret of the operator's")
    if word == "hang":
        while True:
            pass
    if word == "exit":
        os._exit(3)
    if word == "slow":
        time.sleep(0.05)
    if word == "refuse":
        raise Refused("not on a Monday")


class Nothing:
    """Has every hook and changes nothing."""

    def on_request(self, request: Request) -> None:
        pass

    def on_prompt(self, request: RequestInfo, token_ids: Sequence[int]) -> None:
        pass

    def logits_processor(self, request: RequestInfo, output_ids: Sequence[int]) -> None:
        pass

    def on_output(self, request: RequestInfo, output: NewOutput) -> None:
        pass


def _said(request: Request) -> str:
    """The prompt, if it is a text."""
    return request.text or "".join(one.content for one in request.messages or ())


class Told:
    """Does in one hook what the request's id, or its text, says: `hang-on_output-1`."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def _do(self, method: str, request: RequestInfo) -> None:
        said = self._said.get(request.request_id) or request.request_id
        word, _, rest = said.partition("-")
        if rest.partition("-")[0] == method:
            _misbehave(word)

    def on_request(self, request: Request) -> None:
        self._said[request.info.request_id] = _said(request)
        self._do("on_request", request.info)

    def on_prompt(self, request: RequestInfo, token_ids: Sequence[int]) -> None:
        self._do("on_prompt", request)

    def logits_processor(self, request: RequestInfo, output_ids: Sequence[int]) -> None:
        if len(output_ids) == 2:
            self._do("logits_processor", request)

    def on_output(self, request: RequestInfo, output: NewOutput) -> None:
        self._do("on_output", request)


class Editor:
    """Changes all that hooks can change, for requests whose text or id says what."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def _is(self, word: str, request: RequestInfo) -> bool:
        return word in self._said.get(request.request_id, "") + request.request_id

    def on_request(self, request: Request) -> Parameters | None:
        said = self._said[request.info.request_id] = _said(request)
        if "short" in said:
            return replace(request.parameters, max_tokens=3)
        if "likeliest" in said:
            return replace(request.parameters, sampling={"temperature": 0.0, "logit_bias": {9: 99}})
        if "odd" in said:
            return replace(request.parameters, sampling={"temprature": 0.0})
        if "beyond" in said:
            return replace(request.parameters, sampling={"temperature": -1.0})
        return None

    def on_prompt(self, request: RequestInfo, token_ids: Sequence[int]) -> Sequence[int] | None:
        return [5, 17, 9] if self._is("prompt", request) else None

    def on_output(self, request: RequestInfo, output: NewOutput) -> str | Stop | None:
        if self._is("redact", request):
            return "*" * len(output.text)
        if self._is("stop", request) and output.index != 1:
            return Stop("[stopped]")
        return None


class Chooser:
    """Lets tokens 40 to 43 alone follow, of which it likes one after the other."""

    def logits_processor(self, request: RequestInfo, output_ids: Sequence[int]) -> LogitsEdit:
        if request.request_id.startswith("none"):
            return LogitsEdit(allowed=())
        if request.request_id.startswith("large"):
            return LogitsEdit(bias={1: 101.0})
        return LogitsEdit(allowed=range(40, 44), bias={40 + len(output_ids) % 4: 50.0})


class Wrong:
    """Gives what the contract does not have."""

    def on_output(self, request: RequestInfo, output: NewOutput) -> object:
        return 3 if request.request_id == "number" else object()


class Without:
    """Has no hook."""


class Asynchronous:
    async def on_output(self, request: RequestInfo, output: NewOutput) -> None:
        pass


class Unmade:
    def __init__(self) -> None:
        raise RuntimeError("no database")


class Tenants:
    """Tells who asks."""

    def on_request(self, request: Request) -> None:
        raise Refused(f"{request.info.tenant} asks {request.info.model}")

"""The audit log: one JSON line for each generation request.

A line is made in the server's event loop when its request ends, in any way; a separate thread
writes it (`host.line_log`), so a slow disk delays no request.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from trtc.protos.errors import TrtcError
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.host.line_log import LineLog, LineLogConfig
from trtc.runtime.requests.call import current_call
from trtc.runtime.requests.principal import Principal
from trtc.runtime.requests.request import GenerationRequest, Output
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.service.metrics import ServerMetrics
from trtc.runtime.service.progress import LEFT
from trtc.runtime.text.surrogates import without_surrogates

CLOSE_S = 5.0
"""Seconds to write the remaining lines when the server ends."""


@dataclass(frozen=True)
class AuditConfig:
    file: LineLogConfig
    has_content: bool = False
    """Whether prompts and completions are recorded."""


class Entry(msgspec.Struct):
    """The fields of a line, in order. Seconds count from the request's arrival."""

    time: str
    """Time of the arrival, UTC."""
    request_id: str
    """The client's id or a generated one; "": refused before it had one."""
    client: str
    """`tenant NAME`, or `connection ADDRESS` for an anonymous client."""
    model: str
    digest: str
    """Digest of the engine's manifest."""
    call_id: str = ""
    """Id of the request's call, the client's or a generated one."""
    outcome: str = "ok"
    """`ok`, `left`, or the error by its class in trtc.protos.errors."""
    finish_reasons: list[str] = []
    """Finish reasons of the sequences that ended, in the order of their ends."""
    prompt_tokens: int = 0
    cached_prompt_tokens: int | None = None
    """None: the request did not complete."""
    completion_tokens: int = 0
    """Tokens that the engine drew, of all sequences."""
    queue_s: float | None = None
    """Seconds from its submission to the first step that computed it."""
    first_token_s: float | None = None
    total_s: float = 0.0
    prompt: Any = msgspec.UNSET
    """The text, chat or token ids of the prompt. Only if content is recorded."""
    completions: list[str] | list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    """Text of each sequence, or its token ids if the engine has no tokenizer. Only if content is
    recorded."""


class Record:
    """Collects the line of one request. Times are time.monotonic()."""

    def __init__(
        self, entry: Entry, request_input: RequestInput | None, has_tokenizer: bool
    ) -> None:
        """`request_input`: whose content is recorded; None: no content is."""
        self.entry = entry
        self._input = request_input
        self._has_tokenizer = has_tokenizer
        self._arrived_at = time.monotonic()
        self._texts: list[list[str]] = []
        self._token_ids: list[list[int]] = []
        self.is_admitted = False

    def admit(self, request: GenerationRequest) -> None:
        """The engine has accepted the request."""
        self.is_admitted = True
        self.entry.request_id = request.request_id
        self.entry.prompt_tokens = len(request.prompt_ids)
        if self._input is not None:
            self._texts = [[] for _ in range(request.n)]
            self._token_ids = [[] for _ in range(request.n)]

    def deliver(self, outputs: Sequence[Output], at: float) -> None:
        entry = self.entry
        for output in outputs:
            entry.completion_tokens += len(output.token_ids)
            if output.token_ids and entry.first_token_s is None:
                entry.first_token_s = round(at - self._arrived_at, 6)
            if output.finish_reason is not None:
                entry.finish_reasons.append(output.finish_reason.value)
            if output.usage is not None:
                entry.cached_prompt_tokens = output.usage.cached_prompt_tokens
                entry.queue_s = output.usage.queue_s
            if self._input is not None:
                self._texts[output.index].append(output.text)
                self._token_ids[output.index].extend(output.token_ids)

    def fail(self, outcome: str) -> None:
        """The first failure is the request's outcome."""
        if self.entry.outcome == "ok":
            self.entry.outcome = outcome

    def line(self) -> bytes:
        self.entry.total_s = round(time.monotonic() - self._arrived_at, 6)
        if self._input is not None:
            self.entry.prompt = _prompt(self._input)
            self.entry.completions = (
                ["".join(texts) for texts in self._texts]
                if self._has_tokenizer
                else self._token_ids
            )
        return encode(self.entry)


class Audit:
    """Records requests if there is a configuration. Open it before the first one, and close it
    after the last."""

    def __init__(self, config: AuditConfig | None, metrics: ServerMetrics) -> None:
        self._config = config
        self._lost = metrics.audit_lost
        self._log: LineLog | None = None

    def open(self) -> None:
        """Open the file; raises RequestError if that fails."""
        if self._config is not None:
            self._log = LineLog(self._config.file, _lost_line, self._count_lost)

    def close(self) -> None:
        """Write the remaining lines. Idempotent."""
        if self._log is not None:
            if left := self._log.close(CLOSE_S):
                self._count_lost(left)
            self._log = None

    @contextmanager
    def recording(
        self, principal: Principal, handle: EngineHandle, request_input: RequestInput
    ) -> Iterator[Record | None]:
        """Record the request that is served within the context; yields None if nothing is
        recorded."""
        if self._config is None or self._log is None:
            yield None
            return
        entry = Entry(
            time=_now(),
            request_id=request_input.request_id,
            client=principal.name,
            model=handle.name,
            digest=handle.manifest.digest,
            call_id=current_call().id,
        )
        content = request_input if self._config.has_content else None
        record = Record(entry, content, handle.tokenizer is not None)
        log = self._log
        try:
            yield record
        except TrtcError as error:
            record.fail(type(error).__name__)
            raise
        except asyncio.CancelledError:
            if not record.is_admitted:
                record.fail(LEFT)
            raise
        finally:
            log.write(record.line())

    def _count_lost(self, number: int) -> None:
        self._lost.inc(number)


def encode(entry: Entry) -> bytes:
    """The JSON of a line. Clients' texts may have lone surrogates, which UTF-8 cannot encode."""
    try:
        return msgspec.json.encode(entry) + b"\n"
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(entry)
        return msgspec.json.encode(without_surrogates(plain)) + b"\n"


def _prompt(request_input: RequestInput) -> Any:
    if request_input.chat is not None:
        return request_input.chat
    return request_input.text if request_input.text is not None else request_input.token_ids


def _lost_line(number: int) -> bytes:
    return msgspec.json.encode({"time": _now(), "event": "lost", "records": number}) + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

"""The audit log: one JSON line for each request that asked an engine to generate.

A line is made when its request ends, however that is, in the server's loop; a thread of its own
writes it (`host.line_log`), so a slow disk delays nobody.
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
"""For what waits to be written when the server ends."""


@dataclass(frozen=True)
class AuditConfig:
    file: LineLogConfig
    has_content: bool = False
    """Whether prompts and completions are recorded."""


class Entry(msgspec.Struct):
    """A line, in the order of its fields. Seconds count from the request's arrival."""

    time: str
    """Of the arrival, UTC."""
    request_id: str
    """As the client gave it, or drawn by the server; "": refused before."""
    client: str
    """Whose request: `tenant NAME`, or `connection ADDRESS` of an anonymous client."""
    model: str
    digest: str
    """Of the engine's manifest."""
    call_id: str = ""
    """Of the call that it came with, as the client named it, or drawn by the server."""
    outcome: str = "ok"
    """`ok`, `left`, or the error by its class in trtc.protos.errors."""
    finish_reasons: list[str] = []
    """Of the sequences that ended, in the order of their ends."""
    prompt_tokens: int = 0
    cached_prompt_tokens: int | None = None
    """None: the request did not run to its end."""
    completion_tokens: int = 0
    """That the engine gave, of all sequences."""
    queue_s: float | None = None
    """From its submission to the first step that computed it."""
    first_token_s: float | None = None
    total_s: float = 0.0
    prompt: Any = msgspec.UNSET
    """The text, the chat or the token ids that the client sent. With content only."""
    completions: list[str] | list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    """By sequence: their texts, or their token ids where the engine has no tokenizer."""


class Record:
    """What becomes the line of one request. Times are time.monotonic()."""

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
        """Its engine has it."""
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
    """Records requests, if there is a configuration; open it before the first, close it last."""

    def __init__(self, config: AuditConfig | None, metrics: ServerMetrics) -> None:
        self._config = config
        self._lost = metrics.audit_lost
        self._log: LineLog | None = None

    def open(self) -> None:
        """Raises RequestError if the file cannot be opened."""
        if self._config is not None:
            self._log = LineLog(self._config.file, _lost_line, self._count_lost)

    def close(self) -> None:
        """Write what waits. Idempotent."""
        if self._log is not None:
            if left := self._log.close(CLOSE_S):
                self._count_lost(left)
            self._log = None

    @contextmanager
    def recording(
        self, principal: Principal, handle: EngineHandle, request_input: RequestInput
    ) -> Iterator[Record | None]:
        """Record the request that is served within the context; None: nothing is recorded."""
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
    """Text of clients may have lone surrogates, which no UTF-8 has."""
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

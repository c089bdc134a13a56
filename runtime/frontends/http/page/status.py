"""The status document of the page: engines, samples of the last minutes, requests."""

import asyncio
import time
from collections.abc import Sequence

import msgspec

from trtc.protos.errors import InvalidRequestError
from trtc.protos.manifest import AccuracyFacts
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.frontends.http.exchange import Exchange
from trtc.runtime.service.activity import COLUMNS, MAX_SAMPLES, SAMPLE_S, ClientTotals, Sample
from trtc.runtime.service.service import Service
from trtc.runtime.service.timeline import RequestTimes
from trtc.version import __version__

_AFTER = "after"
_MAX_DIGITS = 15


class Accuracy(msgspec.Struct, frozen=True):
    """Accuracy of an engine against the unquantised checkpoint, as in AccuracyFacts."""

    text: str
    tokens: int
    perplexity: float
    reference_perplexity: float | None
    kl: float | None
    top1: float | None
    measured_on: str


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """An open engine, as in its manifest."""

    name: str
    model: str
    digest: str
    family: str
    num_parameters: int
    scheme: str
    kv_dtype: str
    target: str
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    page_size: int
    num_pages: int
    page_bytes: int
    has_tokenizer: bool
    has_chat_template: bool
    num_canaries: int
    has_dummy_weights: bool
    accuracy: Accuracy | None


class State(msgspec.Struct, frozen=True):
    """State of a model, as in Model."""

    name: str
    state: str
    reason: str
    """Why it does not serve; "": it does."""
    is_wanted: bool


class Document(msgspec.Struct, frozen=True, kw_only=True):
    started: str
    """Hexadecimal id of this process, so that the page notices a restart."""
    trtc_version: str
    uptime_s: float
    now: float
    """Current time in seconds, on the clock of all other times of the document."""
    sample_s: float
    max_samples: int
    columns: Sequence[str]
    num_samples: int
    """Value of `after` for the next request."""
    samples: Sequence[Sample]
    states: Sequence[State]
    engines: Sequence[Engine]
    running: Sequence[RequestTimes]
    ended: Sequence[RequestTimes]
    clients: Sequence[ClientTotals]
    open_streams: int


class Status:
    """Answers with the document."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started_at = time.monotonic()
        self._started = f"{time.time_ns():x}"

    async def answer(self, exchange: Exchange) -> None:
        """Answer; `?after=N` leaves out the first N samples, and requests that ended before."""
        document = self._document(_after(exchange.query(_AFTER).get(_AFTER, "0")))
        # In a thread: encoding ten minutes of several engines takes milliseconds.
        body = await asyncio.to_thread(msgspec.json.encode, document)
        headers = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
        await exchange.answer(200, body, headers=headers)

    def _document(self, after: int) -> Document:
        service = self._service
        activity = service.activity.snapshot(after)
        now = time.monotonic()
        return Document(
            started=self._started,
            trtc_version=__version__,
            uptime_s=round(now - self._started_at, 3),
            now=now,
            sample_s=SAMPLE_S,
            max_samples=MAX_SAMPLES,
            columns=COLUMNS,
            num_samples=activity.num_samples,
            samples=activity.samples,
            states=[
                State(one.name, one.state.value, one.reason, one.is_wanted)
                for one in service.models.all()
            ],
            engines=[_engine(one) for one in service.engines.values()],
            running=activity.running,
            ended=activity.ended,
            clients=activity.clients,
            open_streams=service.num_open,
        )


def _after(value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS):
        raise InvalidRequestError(
            f"is {value[:40]!r}", field=_AFTER, remedy="Give a number of samples, 0 or more"
        )
    return int(value)


def _engine(handle: EngineHandle) -> Engine:
    facts, manifest = handle.info(), handle.manifest
    return Engine(
        name=facts.name,
        model=manifest.model.name,
        digest=facts.engine_digest,
        family=facts.family,
        num_parameters=manifest.model.num_parameters,
        scheme=facts.scheme,
        kv_dtype=facts.kv_dtype,
        target=facts.target,
        max_seq_len=facts.max_seq_len,
        max_batch_size=facts.max_batch_size,
        max_num_tokens=facts.max_num_tokens,
        page_size=facts.page_size,
        num_pages=facts.num_pages,
        page_bytes=manifest.ledger.page,
        has_tokenizer=facts.has_tokenizer,
        has_chat_template=facts.has_chat_template,
        num_canaries=len(manifest.canaries),
        has_dummy_weights=manifest.dummy_weights,
        accuracy=None if manifest.accuracy is None else _accuracy(manifest.accuracy),
    )


def _accuracy(facts: AccuracyFacts) -> Accuracy:
    return Accuracy(
        text=facts.text,
        tokens=facts.tokens,
        perplexity=facts.perplexity,
        reference_perplexity=facts.reference_perplexity,
        kl=facts.kl,
        top1=facts.top1,
        measured_on=facts.measured_on,
    )

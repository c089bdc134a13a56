"""An engine in this process, for `trtc.open_engine` and `trtc generate`."""

import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from trtc.protos.errors import TrtcError, UnavailableError, UnknownModelError
from trtc.protos.manifest import Manifest
from trtc.runtime.engine.admission import Origin, admission, run_here
from trtc.runtime.engine.loop import Delivery, EngineLoop, LoopConfig, LoopStats
from trtc.runtime.engine.opening import start
from trtc.runtime.engine.session import Session, open_session
from trtc.runtime.integrity.verify import HashCheck
from trtc.runtime.requests.generating import BlockingGeneration, Closing, Generating
from trtc.runtime.requests.keywords import names_checked
from trtc.runtime.requests.request import GenerationRequest, Output
from trtc.runtime.requests.request_defaults import GenerationConfig, request_defaults
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.splitting import splitting
from trtc.runtime.requests.token_masks import TokenMasks, both_masks
from trtc.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from trtc.runtime.engine.drafting import DraftConfig
    from trtc.runtime.requests.model_info import ModelInfo


class LocalGeneration(BlockingGeneration):
    """A running completion of an engine in this process.

    Its last output is delivered after the engine's weights have been verified: their hashes match,
    and their file was not written to meanwhile. If not, EngineCorruptError is raised instead.
    """

    def __init__(
        self,
        request: GenerationRequest,
        loop: EngineLoop,
        late_check: HashCheck | None = None,
        raise_if_changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Submit the request; raises the errors of `EngineLoop.submit`."""
        super().__init__(request.request_id)
        self._raise_if_changed = raise_if_changed
        self._loop = loop
        self._late_check = late_check
        self._deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._outputs: Iterator[Output] = iter(())
        self._split = splitting(request)
        self._ended = False
        self._number: int | None = None
        self._number = loop.submit(request, _sink(self._deliveries, late_check))

    def __next__(self) -> Output:
        while (output := next(self._outputs, None)) is None:
            if self._ended:
                raise StopIteration
            self._receive()
        self._collector.add(output)
        return output

    def _receive(self) -> None:
        delivery = self._deliveries.get()
        if isinstance(delivery, TrtcError):
            self._ended = True
            raise delivery
        self._ended = delivery[-1].usage is not None
        if self._ended:
            if self._late_check is not None:
                self._late_check.wait()
            self._raise_if_changed()
        self._outputs = iter(delivery if self._split is None else self._split(delivery))

    def cancel(self) -> None:
        """End the request; outputs so far can still be read."""
        if self._number is not None:
            self._loop.cancel(self._number)

    def __del__(self) -> None:
        if not self._ended:
            self.cancel()


def _sink(
    deliveries: "queue.SimpleQueue[Delivery]", late_check: HashCheck | None
) -> Callable[[Delivery], None]:
    """A sink for the loop's thread; it holds no reference to the generation."""

    def put(delivery: Delivery) -> None:
        deliveries.put(delivery)
        if late_check is not None:
            late_check.begin()

    return put


class LocalEngine(Generating[LocalGeneration], Closing):
    """An opened engine and its loop. Thread-safe. Close it to free its memory."""

    def __init__(
        self,
        session: Session,
        config: LoopConfig | None = None,
        *,
        generation_config: GenerationConfig = "model",
        kv_host_bytes: int = 0,
        drafts: "DraftConfig | None" = None,
    ) -> None:
        model = session.manifest.model
        self._session = session
        config = config or LoopConfig(
            kv_host_bytes=kv_host_bytes,
            eos_token_ids=model.eos_token_ids,
            defaults=request_defaults(model, generation_config),
            drafts=drafts,
        )
        self._engine = start(session, model.name, config)
        self._loop = self._engine.loop
        self._closed = False

    @classmethod
    @names_checked
    def open(
        cls,
        engine: Path | str,
        *,
        num_threads: int | None = None,
        kv_bytes: int | None = None,
        kv_host_bytes: int = 0,
        dummy_weights: bool = False,
        verify: bool = True,
        generation_config: GenerationConfig = "model",
        draft: Literal["ngram"] | None = None,
        draft_tokens: int = 4,
    ) -> "LocalEngine":
        """Verify and load an engine directory; for other arguments and errors see `open_session`.

        Args:
            kv_host_bytes: bytes of host memory for pages that the KV pool has no room for.
            generation_config: source of the sampling defaults: the model's generation_config.json,
                or trtc's own.
            draft: drafter for speculative decoding; see `open_engine`.
            draft_tokens: most drafts of a sequence in a step.

        Weights are hashed after the first token: see LocalGeneration.
        """
        session = open_session(
            Path(engine),
            num_threads=num_threads,
            kv_bytes=kv_bytes,
            dummy_weights=dummy_weights,
            verify=verify,
            quick_start=True,
        )
        return cls(
            session,
            generation_config=generation_config,
            kv_host_bytes=kv_host_bytes,
            drafts=None if draft is None else _draft_config(draft, draft_tokens),
        )

    @property
    def manifest(self) -> Manifest:
        return self._session.manifest

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._session.tokenizer

    def info(self) -> "ModelInfo":
        """The description of this engine that a server gives."""
        return self._engine.info()

    def submit(
        self,
        request_input: RequestInput,
        *,
        timeout: float | None = None,
        masks: TokenMasks | None = None,
    ) -> LocalGeneration:
        """Submit a request; it runs concurrently with all others that have not ended.

        Args:
            timeout: seconds after which it ends with DeadlineError.
            masks: says which tokens may come next in its sequences, beside the input's grammar.

        Raises:
            InvalidRequestError: a field is invalid for the engine; names it.
        """
        if self._closed:
            raise UnavailableError("the engine is closed")
        late_check = self._session.late_check
        if late_check is not None:
            late_check.raise_failure()
        self._session.raise_if_changed()
        request = self._request(request_input, timeout)
        request = replace(request, masks=both_masks(request.masks, masks))
        return LocalGeneration(request, self._loop, late_check, self._session.raise_if_changed)

    def stats(self) -> LoopStats:
        return self._loop.stats()

    def close(self) -> None:
        """Stop the loop, end running requests with UnavailableError and free the engine.
        Idempotent."""
        self._closed = True
        self._loop.stop()
        self._engine.close()

    def _request(self, request_input: RequestInput, timeout: float | None) -> GenerationRequest:
        if request_input.model not in ("", self._engine.name):
            raise UnknownModelError(
                f"this engine is {self._engine.name!r}, not {request_input.model!r}",
                field="model",
                remedy="Leave it out",
            )
        origin = Origin(deadline=None if timeout is None else time.monotonic() + timeout)
        return run_here(admission(self._engine, request_input, origin))


def _draft_config(method: Literal["ngram"], num_tokens: int) -> "DraftConfig":
    from trtc.runtime.engine.drafting import DraftConfig  # few engines are opened with drafts

    return DraftConfig(method, num_tokens)

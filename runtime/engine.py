"""An engine in this process: what `trtc.open_engine` gives and `trtc generate` uses."""

import itertools
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from trtc.protos.errors import NoTokenizerError, TrtcError, UnavailableError, UnknownModelError
from trtc.protos.manifest import Manifest
from trtc.runtime.completion import Collector, Result
from trtc.runtime.draft import RequestDraft
from trtc.runtime.generate_options import GenerateOptions, draft_of_chat, draft_of_prompt
from trtc.runtime.loop import Delivery, EngineLoop, LoopConfig, LoopStats
from trtc.runtime.request import GenerationRequest, Output
from trtc.runtime.session import Session, open_session
from trtc.runtime.tokenizer import Tokenizer
from trtc.runtime.validation import finish_draft
from trtc.runtime.verify import HashCheck


class LocalGeneration(Iterator[Output]):
    """A completion on its way: iterate over its outputs, or wait for all of it with `result`.

    Its last output comes when the engine's weights are known to be whole; if they are not, an
    EngineCorruptError comes instead. Leaving it as a context manager ends what has not come.
    """

    def __init__(
        self, request_id: str, loop: EngineLoop, late_check: HashCheck | None = None
    ) -> None:
        self.request_id = request_id
        self._loop = loop
        self._late_check = late_check
        self._deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._outputs: Iterator[Output] = iter(())
        self._collector = Collector()
        self._ended = False

    def sink(self, delivery: Delivery) -> None:
        """Where the loop's thread leaves what it has."""
        self._deliveries.put(delivery)
        if self._late_check is not None:
            self._late_check.begin()

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
        if self._ended and self._late_check is not None:
            self._late_check.wait()
        self._outputs = iter(delivery)

    def result(self) -> Result:
        """Read what has not been read yet and return the whole."""
        for _ in self:
            pass
        return self._collector.result()

    def cancel(self) -> None:
        """End the request; what it has given so far can still be read."""
        self._loop.abort(self.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()


class LocalEngine:
    """An opened engine and its loop; safe to share between threads. Close it to free its memory."""

    def __init__(self, session: Session, config: LoopConfig | None = None) -> None:
        self._session = session
        self._loop = EngineLoop(
            session.executor,
            session.tokenizer,
            config or LoopConfig(eos_token_ids=session.manifest.model.eos_token_ids),
        )
        self._loop.start()
        self._numbers = itertools.count()
        self._closed = False

    @classmethod
    def open(
        cls,
        engine: Path | str,
        *,
        num_threads: int | None = None,
        kv_bytes: int | None = None,
        dummy_weights: bool = False,
        verify: bool = True,
    ) -> "LocalEngine":
        """Verify and load an engine directory; for arguments and errors see `open_session`.

        Weights are hashed from the first token on: see LocalGeneration.
        """
        session = open_session(
            Path(engine),
            num_threads=num_threads,
            kv_bytes=kv_bytes,
            dummy_weights=dummy_weights,
            verify=verify,
            quick_start=True,
        )
        return cls(session)

    @property
    def manifest(self) -> Manifest:
        return self._session.manifest

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._session.tokenizer

    def generate(
        self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]
    ) -> LocalGeneration:
        """Complete a text or its token ids.

        Raises:
            InvalidRequestError: a field that the engine can't honour, by name.
            NoTokenizerError: a text for an engine without a tokenizer.
        """
        return self.submit(draft_of_prompt(prompt, options))

    def chat(
        self, messages: Sequence[Mapping[str, str]], **options: Unpack[GenerateOptions]
    ) -> LocalGeneration:
        """Answer a conversation of `{"role": ..., "content": ...}` messages."""
        return self.submit(draft_of_chat(messages, options))

    def submit(self, draft: RequestDraft, *, timeout: float | None = None) -> LocalGeneration:
        """Start a request; it runs with all others that have not ended.

        Args:
            timeout: seconds after which it ends with DeadlineError.
        """
        if self._closed:
            raise UnavailableError("the engine is closed")
        late_check = self._session.late_check
        if late_check is not None:
            late_check.raise_failure()
        request = self._request(draft, timeout)
        generation = LocalGeneration(request.request_id, self._loop, late_check)
        self._loop.submit(request, generation.sink)
        return generation

    def stats(self) -> LoopStats:
        return self._loop.stats()

    def close(self) -> None:
        """Stop the loop, end what runs with UnavailableError and free the engine. Idempotent."""
        self._closed = True
        self._loop.stop()
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _request(self, draft: RequestDraft, timeout: float | None) -> GenerationRequest:
        name = self.manifest.model.name
        if draft.model not in ("", name):
            raise UnknownModelError(
                f"this engine is {name!r}, not {draft.model!r}",
                field="model",
                remedy="Leave it out",
            )
        return finish_draft(
            draft,
            request_id=draft.request_id or f"local-{next(self._numbers)}",
            prompt_ids=self._prompt_ids(draft),
            deadline=None if timeout is None else time.monotonic() + timeout,
            bounds=self._loop.bounds,
        )

    def _prompt_ids(self, draft: RequestDraft) -> Sequence[int]:
        if draft.token_ids is not None:
            return draft.token_ids
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise NoTokenizerError(
                "the engine was built without a tokenizer",
                field="prompt",
                remedy="Give token ids, or build it from a checkpoint with tokenizer.json",
            )
        if draft.chat is not None:
            return tokenizer.encode_chat([one.as_template_input() for one in draft.chat])
        return tokenizer.encode(draft.text or "")

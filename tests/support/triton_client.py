"""The unmodified `tritonclient.grpc`, and what it tells of one request."""

import queue
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.tensors import tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its stubs are made by an older protobuf than ours
    grpcclient = pytest.importorskip(
        "tritonclient.grpc", reason="make setup installs it", exc_type=ImportError
    )
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

PATIENCE_S = 60.0
MICROSECONDS = 1_000_000


@dataclass(frozen=True)
class Message:
    outputs: dict[str, NDArray[Any]]
    final: bool
    request_id: str = ""

    @property
    def text(self) -> str:
        """As every client of the backend reads it."""
        return str(self.outputs["text_output"][0].decode())

    @property
    def token_ids(self) -> list[int]:
        return list(self.outputs["output_ids"][0][0].tolist())

    @property
    def finish_reason(self) -> str:
        return str(self.outputs["finish_reason"][0].decode())


class Stream:
    """One bidirectional stream of a client."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def take(self, result: Any, error: Any) -> None:
        self._answers.put((result, error))

    def send(
        self,
        model: str,
        *,
        request_id: str = "",
        timeout_s: float | None = None,
        outputs: Sequence[str] | None = None,
        empty_final: bool = False,
        **inputs: Any,
    ) -> None:
        """A request of one row; `rows` of `send_rows` for more."""
        rows = {name: [value] for name, value in inputs.items()}
        self.send_rows(
            model,
            rows,
            request_id=request_id,
            timeout_s=timeout_s,
            outputs=outputs,
            empty_final=empty_final,
        )

    def send_rows(
        self,
        model: str,
        rows: dict[str, list[Any]],
        *,
        request_id: str = "",
        timeout_s: float | None = None,
        outputs: Sequence[str] | None = None,
        empty_final: bool = False,
    ) -> None:
        self._client.async_stream_infer(
            model,
            [input_of(name, tensor(name, values)) for name, values in rows.items()],
            request_id=request_id,
            outputs=None
            if outputs is None
            else [grpcclient.InferRequestedOutput(name) for name in outputs],
            timeout=None if timeout_s is None else int(timeout_s * MICROSECONDS),
            enable_empty_final_response=empty_final,
        )

    def receive(self) -> Message:
        """The next message.

        Raises:
            InferenceServerException: an error instead.
        """
        result, error = self._answers.get(timeout=PATIENCE_S)
        if error is not None:
            raise error
        response = result.get_response()
        return Message(
            {output.name: result.as_numpy(output.name) for output in response.outputs},
            response.parameters["triton_final_response"].bool_param,
            response.id,
        )

    def receive_all(self) -> list[Message]:
        """The messages of the one request that is open, to the final one."""
        messages = [self.receive()]
        while not messages[-1].final:
            messages.append(self.receive())
        return messages

    @property
    def is_empty(self) -> bool:
        return self._answers.empty()


@contextmanager
def open_stream(port: int, *, cancel: bool = False) -> Iterator[Stream]:
    """A client with a stream.

    Args:
        cancel: end the stream on the way out without waiting for what has been asked.
    """
    with grpcclient.InferenceServerClient(f"127.0.0.1:{port}") as client:
        stream = Stream(client)
        client.start_stream(callback=stream.take)
        try:
            yield stream
        finally:
            client.stop_stream(cancel_requests=cancel)


def ask(port: int, model: str, **request: Any) -> list[Message]:
    """All messages of one request."""
    with open_stream(port) as stream:
        stream.send(model, **request)
        messages = stream.receive_all()
    assert stream.is_empty, "more came after the final message"
    return messages


def refusal(port: int, model: str, **request: Any) -> str:
    """The error that a request is answered with, and nothing else."""
    with open_stream(port) as stream:
        stream.send(model, **request)
        with pytest.raises(InferenceServerException) as caught:
            stream.receive()
    assert stream.is_empty
    return str(caught.value.message())


def input_of(name: str, values: NDArray[Any]) -> Any:
    """An array as the client sends it."""
    sent = grpcclient.InferInput(name, values.shape, np_to_triton_dtype(values.dtype))
    return sent.set_data_from_numpy(np.ascontiguousarray(values))

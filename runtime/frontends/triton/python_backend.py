"""The model class of Triton's Python backend; the only file that uses its utilities.

The backend runs each model instance in a process of its own. `execute` returns at once: answers are
sent through the requests' response senders, so the model is decoupled.
"""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from trtc.protos.errors import (
    CancelledError,
    DeadlineError,
    EngineError,
    EnvironmentFault,
    InvalidRequestError,
    NoTokenizerError,
    QueueFullError,
    TrtcError,
    UnavailableError,
    UnknownModelError,
    UnknownRequestError,
    UserError,
    by_class,
)
from trtc.runtime.engine.loop import LoopStats
from trtc.runtime.frontends.triton.deployment import Call
from trtc.runtime.frontends.triton.opening import open_deployment
from trtc.runtime.service.metrics import LOOP_READINGS
from trtc.runtime.tensors.replies import Message

_log = logging.getLogger("trtc.triton")

_ERROR_CODES: dict[type[TrtcError], str] = {
    UserError: "INVALID_ARG",
    EngineError: "UNSUPPORTED",
    EnvironmentFault: "UNSUPPORTED",
    InvalidRequestError: "INVALID_ARG",
    QueueFullError: "UNAVAILABLE",
    DeadlineError: "CANCELLED",
    CancelledError: "CANCELLED",
    NoTokenizerError: "UNSUPPORTED",
    UnknownModelError: "NOT_FOUND",
    UnknownRequestError: "NOT_FOUND",
    UnavailableError: "UNAVAILABLE",
}
"""Error class -> name of Triton's code; others are INTERNAL. By name, because the utilities are
empty when Triton imports this file to complete the configuration."""


class TritonPythonModel:
    """The class that Triton calls; names are given by its API."""

    def initialize(self, args: Mapping[str, str]) -> None:
        try:
            _check_numpy()
            self._deployment = open_deployment(
                args, on_stats=_Metrics(args["model_name"], args["model_version"])
            )
        except TrtcError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            timeout_us = request.timeout()
            self._deployment.start(
                Call(
                    request_id=request.request_id(),
                    tensors={one.name(): one.as_numpy() for one in request.inputs()},
                    timeout_s=timeout_us / 1e6 if timeout_us else None,
                    reply=_TritonReply(request.get_response_sender()),
                )
            )

    def finalize(self) -> None:
        self._deployment.close()


class _TritonReply:
    """Implements Reply."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def send(self, message: Message | TrtcError, *, final: bool) -> None:
        if isinstance(message, TrtcError):
            code = getattr(pb_utils.TritonError, by_class(_ERROR_CODES, message, "INTERNAL"))
            response = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(message), code))
        else:
            response = pb_utils.InferenceResponse(
                [pb_utils.Tensor(name, array) for name, array in message.items()]
            )
        self._sender.send(
            response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        )

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


class _Metrics:
    """The engine's statistics as Triton metrics, with the names of `trtc serve`."""

    def __init__(self, model: str, version: str) -> None:
        labels = {"model_name": model, "version": version}
        kinds = pb_utils.MetricFamily
        self._said: dict[str, float] = {}
        self._families, self._metrics = [], {}
        for row in LOOP_READINGS:
            name = f"trtc_{row.name}_total" if row.is_counter else f"trtc_{row.name}"
            family = pb_utils.MetricFamily(
                name=name,
                description=row.help,
                kind=kinds.COUNTER if row.is_counter else kinds.GAUGE,
            )
            self._families.append(family)  # a metric lives as long as its family
            self._metrics[row.name] = family.Metric(labels=labels)

    def __call__(self, stats: LoopStats) -> None:
        for row in LOOP_READINGS:
            value, before = float(row.value(stats)), self._said.get(row.name, 0.0)
            if value != before:
                self._metrics[row.name].increment(value - before)
                self._said[row.name] = value


def _check_numpy() -> None:
    """Check NumPy's version: a backend built for NumPy 1 makes arrays of stride 0 with NumPy 2.

    Raises:
        EnvironmentFault: the arrays are wrong.
    """
    there = np.arange(6, dtype=np.int32).reshape(2, 3)
    back = pb_utils.Tensor.from_dlpack("back", pb_utils.Tensor("there", there)).as_numpy()
    if not np.array_equal(back, there):
        raise EnvironmentFault(
            f"{np.__version__} is too new for this Triton's Python backend",
            field="numpy",
            remedy="pip install 'numpy<2' in the Python that Triton runs",
        )

"""Model metadata, configuration, statistics and loading in the shapes of KServe and Triton, for
gRPC and HTTP.

Answers are dictionaries with the fields of the protocol's messages. Only the newest version of a
name is served; older ones are in the index while their streams go on.
"""

import logging
from collections.abc import Mapping
from typing import Any

from trtc.protos.errors import InvalidRequestError, UnknownModelError, UnsupportedError
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.requests.naming import fields_as_sent
from trtc.runtime.requests.principal import Principal
from trtc.runtime.service.instruments import Histogram
from trtc.runtime.service.model_control import ModelControl
from trtc.runtime.service.service import Service
from trtc.runtime.tensors.codec import datatype
from trtc.runtime.tensors.table import INPUTS, OUTPUTS, Tensor
from trtc.version import __version__

PLATFORM = "trtc"
NS = 1_000_000_000
EXTENSIONS = ("model_configuration", "model_repository", "statistics")
KV_BYTES = "kv_bytes"
"""Parameter of a load: bytes of the model's KV pool."""
Parameters = Mapping[str, Any]
_NAMES = {"model": "model_name"}

_log = logging.getLogger("trtc.server")


def check_version(engine: EngineHandle, version: str) -> None:
    """Raises UnknownModelError if an engine has another version; "" matches any."""
    if version not in ("", engine.version):
        raise UnknownModelError(
            f"is {version[:100]!r}",
            field="model_version",
            remedy=f"{engine.name} has the version {engine.version} only: leave it out, or send "
            "that",
        )


def engine_of(service: Service, principal: Principal, name: str, version: str) -> EngineHandle:
    """The engine of a model's version, for information about it.

    Raises:
        UnknownModelError: there is no such model or version.
        ForbiddenError: `principal` may not use it.
        UnavailableError: it is not open yet.
    """
    with fields_as_sent(_NAMES):
        engine = service.engine_for(principal, name)
    check_version(engine, version)
    return engine


def engines_of(service: Service, principal: Principal) -> list[EngineHandle]:
    """All engines that `principal` may use."""
    may = principal.limits.may_use
    return [handle for handle in service.engines.values() if may(handle.name)]


def is_ready(service: Service, principal: Principal, name: str, version: str) -> bool:
    """Whether a version of a model is ready; false for unknown ones."""
    model = service.models.get(name)
    if model is None or model.engine is None or not principal.limits.may_use(name):
        return False
    return not model.reason and version in ("", model.engine.version)


def server_metadata(*extensions: str) -> dict[str, Any]:
    """Metadata of the server.

    Args:
        extensions: extensions of the protocol in addition to EXTENSIONS.
    """
    return {"name": "trtc", "version": __version__, "extensions": [*EXTENSIONS, *extensions]}


def metadata(handle: EngineHandle) -> dict[str, Any]:
    return {
        "name": handle.name,
        "versions": [handle.version],
        "platform": PLATFORM,
        "inputs": [_described(tensor) for tensor in INPUTS],
        "outputs": [_described(tensor) for tensor in OUTPUTS],
    }


def config(handle: EngineHandle) -> dict[str, Any]:
    manifest = handle.manifest
    kind = "KIND_CPU" if manifest.target.kind == "cpu" else "KIND_GPU"
    return {
        "name": handle.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": manifest.limits.max_batch_size,
        "input": [{**_configured(tensor), "optional": True} for tensor in INPUTS],
        "output": [_configured(tensor) for tensor in OUTPUTS],
        "instance_group": [{"name": handle.name, "kind": kind, "count": 1}],
        "model_transaction_policy": {"decoupled": True},
    }


async def index(
    service: Service, principal: Principal, *, repository: str, ready: bool
) -> list[dict[str, Any]]:
    """One entry for each version that `principal` may use; with `ready`, only those being served.

    Args:
        repository: the request's repository; there is only one, without a name.
    """
    _check_repository(repository)
    entries = await _control(service).index()
    return [
        {
            "name": one.name,
            "version": one.version,
            "state": one.state.value,
            "reason": one.reason,
        }
        for one in entries
        if principal.limits.may_use(one.name) and not (ready and one.reason)
    ]


def statistics(service: Service, handle: EngineHandle) -> dict[str, Any]:
    """Statistics since the start, of requests over all protocols. An execution is a step of the
    engine; the time of a request outside the queue is its inference."""
    metrics, name = service.metrics, handle.name
    count, total_s = _histogram(metrics.whole_request, name)
    queued, queue_s = _histogram(metrics.queue, name)
    failed = sum(one.value for (model, _), one in metrics.failure.series() if model == name)
    return {
        "name": name,
        "version": handle.version,
        "inference_count": count,
        "execution_count": handle.loop.stats().steps,
        "inference_stats": {
            "success": _duration(count, total_s),
            "fail": _duration(int(failed), 0.0),
            "queue": _duration(queued, queue_s),
            "compute_infer": _duration(count, max(0.0, total_s - queue_s)),
        },
    }


async def load(
    service: Service, principal: Principal, name: str, repository: str, parameters: Parameters
) -> None:
    """Load the newest version of a model.

    Raises:
        ForbiddenError: `principal` may not use it.
        InvalidRequestError: a parameter is unknown. Also raises the errors of `ModelControl.load`.
    """
    _check_repository(repository)
    service.check_model(principal, name)
    kv_bytes = None
    for key, value in parameters.items():
        if key != KV_BYTES:
            raise InvalidRequestError(
                "is not known",
                field=f"parameters.{key[:100]}",
                remedy=f"Give {KV_BYTES}, or none: an engine has its configuration within",
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidRequestError(
                "is no positive integer", field=f"parameters.{key}", remedy="Give bytes"
            )
        kv_bytes = value
    _log.info("load model=%s asked by %s", name[:100], principal.name)
    await _control(service).load(name, kv_bytes)


async def unload(
    service: Service, principal: Principal, name: str, repository: str, parameters: Parameters
) -> None:
    """Unload a model, after its running requests have ended.

    Raises:
        ForbiddenError: `principal` may not use it.
        InvalidRequestError: a parameter is unknown. Also raises the errors of
            `ModelControl.unload`.
    """
    _check_repository(repository)
    service.check_model(principal, name)
    for key in parameters:
        if (
            key != "unload_dependents"
        ):  # Triton's clients always send it; there are no dependents here
            raise InvalidRequestError(
                "is not known", field=f"parameters.{key[:100]}", remedy="Leave it out"
            )
    _log.info("unload model=%s asked by %s", name[:100], principal.name)
    await _control(service).unload(name)


def _control(service: Service) -> ModelControl:
    if service.control is None:
        raise UnsupportedError("models do not come and go here")
    return service.control


def _check_repository(name: str) -> None:
    if name:
        raise UnknownModelError(
            f"is {name[:100]!r}",
            field="repository_name",
            remedy="There is one repository, which has no name: leave it out",
        )


def _described(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": datatype(tensor), "shape": [-1, *tensor.dims]}


def _configured(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": tensor.data_type, "dims": list(tensor.dims)}


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": int(seconds * NS)}


def _histogram(metric: Histogram, model: str) -> tuple[int, float]:
    """(number of observations, their sum)."""
    found = dict(metric.series()).get((model,))
    if found is None:
        return 0, 0.0
    counts, total = found.read()
    return counts[-1], total

"""What a server says of its models, as KServe and Triton word it; the same over gRPC and HTTP.

Answers are dictionaries with the fields of the protocol's messages. An engine is version 1 of its
name, which is the only one.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from prometheus_client.metrics import MetricWrapperBase

from trtc.protos.errors import UnknownModelError, UnsupportedError
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.requests.naming import fields_as_sent
from trtc.runtime.requests.principal import Principal
from trtc.runtime.service.service import Service
from trtc.runtime.tensors.codec import datatype
from trtc.runtime.tensors.table import INPUTS, OUTPUTS, Tensor
from trtc.version import __version__

VERSION = "1"
PLATFORM = "trtc"
NS = 1_000_000_000
EXTENSIONS = ("model_configuration", "statistics")
_NAMES = {"model": "model_name"}


def check_version(version: str) -> None:
    """Raises UnknownModelError for another than VERSION; "" is that."""
    if version not in ("", VERSION):
        raise UnknownModelError(
            f"is {version[:100]!r}",
            field="model_version",
            remedy=f"Every model has the version {VERSION} only: leave it out, or send that",
        )


def engine_of(service: Service, principal: Principal, name: str, version: str) -> EngineHandle:
    """The engine of a model's version, for what is told of it.

    Raises:
        UnknownModelError: there is no such model or version.
        ForbiddenError: `principal` may not use it.
        UnavailableError: it is not open yet.
    """
    check_version(version)
    with fields_as_sent(_NAMES):
        return service.engine_for(principal, name)


def engines_of(service: Service, principal: Principal) -> list[EngineHandle]:
    """All that `principal` may use."""
    may = principal.limits.may_use
    return [handle for handle in service.engines.values() if may(handle.name)]


def is_ready(service: Service, principal: Principal, name: str, version: str) -> bool:
    """Whether a version of a model serves; one that is unknown does not."""
    is_known = principal.limits.may_use(name) and version in ("", VERSION)
    return is_known and service.models.is_ready(name)


def server_metadata(*extensions: str) -> dict[str, Any]:
    """
    Args:
        extensions: that the protocol has beside EXTENSIONS.
    """
    return {"name": "trtc", "version": __version__, "extensions": [*EXTENSIONS, *extensions]}


def metadata(handle: EngineHandle) -> dict[str, Any]:
    return {
        "name": handle.name,
        "versions": [VERSION],
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


def index(service: Service, principal: Principal, *, ready: bool) -> list[dict[str, Any]]:
    """One entry a model that `principal` may use; with `ready`, of those that serve now."""
    return [
        {
            "name": one.name,
            "version": VERSION,
            "state": one.state.value,
            "reason": one.reason,
        }
        for one in service.models.all()
        if principal.limits.may_use(one.name) and not (ready and one.reason)
    ]


def statistics(service: Service, handle: EngineHandle) -> dict[str, Any]:
    """Since the start, of requests by every protocol. An execution is a step of the engine; what a
    request did not spend in the queue is its inference."""
    metrics, name = service.metrics, handle.name
    count, total_s = _histogram(metrics.whole_request, name)
    queued, queue_s = _histogram(metrics.queue, name)
    failed = sum(value for _, value in _samples(metrics.failure, name, "_total"))
    return {
        "name": name,
        "version": VERSION,
        "inference_count": count,
        "execution_count": handle.loop.stats().steps,
        "inference_stats": {
            "success": _duration(count, total_s),
            "fail": _duration(int(failed), 0.0),
            "queue": _duration(queued, queue_s),
            "compute_infer": _duration(count, max(0.0, total_s - queue_s)),
        },
    }


def refuse_to_load() -> NoReturn:
    """Raises UnsupportedError."""
    raise UnsupportedError(
        "models do not come and go while the server runs",
        remedy="Start another `trtc serve` with the engines that are wanted, and end this one",
    )


def _described(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": datatype(tensor), "shape": [-1, *tensor.dims]}


def _configured(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": tensor.data_type, "dims": list(tensor.dims)}


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": int(seconds * NS)}


def _histogram(metric: MetricWrapperBase, model: str) -> tuple[int, float]:
    """How many observations, and their sum."""
    count = sum(value for _, value in _samples(metric, model, "_count"))
    return int(count), sum(value for _, value in _samples(metric, model, "_sum"))


def _samples(
    metric: MetricWrapperBase, model: str, suffix: str
) -> list[tuple[Mapping[str, str], float]]:
    return [
        (sample.labels, sample.value)
        for family in metric.collect()
        for sample in family.samples
        if sample.name.endswith(suffix) and sample.labels["model_name"] == model
    ]

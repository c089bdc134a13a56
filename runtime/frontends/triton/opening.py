"""Opens the engine of a Triton model instance."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trtc.plugins.gpu.probe import device_sm
from trtc.protos.errors import EngineIncompatibleError
from trtc.runtime.engine.canary import why_canaries_fail
from trtc.runtime.engine.config import EngineConfig, EngineSource
from trtc.runtime.engine.loop import LoopStats
from trtc.runtime.engine.opening import open_handle
from trtc.runtime.frontends.triton.config import ENGINE_PARAMETER
from trtc.runtime.frontends.triton.deployment import Deployment
from trtc.runtime.frontends.triton.engines import choose_engine
from trtc.runtime.frontends.triton.settings import Settings, read_settings

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def open_deployment(
    instance: Mapping[str, str], *, on_stats: Callable[[LoopStats], None]
) -> Deployment:
    """Verify and open the engine of a model instance and run its canaries.

    Args:
        instance: Triton's arguments of `initialize`.

    Raises:
        RequestError: a parameter of config.pbtxt is wrong.
        EngineError: the engine is damaged, not for this machine, or gives other tokens than when
            it was built.
        EnvironmentFault: too little memory, no GPU, or the code does not load.
    """
    config = json.loads(instance["model_config"])
    parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
    engine = parameters.pop(ENGINE_PARAMETER, "")
    settings = read_settings(parameters)
    path = choose_engine(
        Path(instance["model_repository"]) / instance["model_version"],
        engine,
        config.get("cc_model_filenames", {}),
        _own_sm(instance),
    )
    return _open(instance["model_name"], path, settings, on_stats)


def _open(
    name: str, path: Path, settings: Settings, on_stats: Callable[[LoopStats], None]
) -> Deployment:
    handle = open_handle(
        EngineSource(name, path),
        EngineConfig(
            max_queue=settings.max_queue,
            prefix_cache=settings.enable_kv_cache_reuse,
            num_threads=settings.num_threads,
            kv_bytes=settings.kv_bytes,
            kv_host_bytes=settings.kv_cache_host_memory_bytes or 0,
        ),
    )
    if why := why_canaries_fail(handle):
        handle.loop.stop()
        handle.close()
        raise EngineIncompatibleError(
            f"gives other tokens here than when it was built: {why}",
            field=str(path),
            remedy="Build it again on this machine, or for it",
        )
    return Deployment(handle, settings, on_stats=on_stats)


def _own_sm(instance: Mapping[str, Any]) -> int | None:
    """The SM of the instance's GPU, which becomes the only visible one of this process."""
    if instance["model_instance_kind"] != "GPU":
        return None
    ordinal = int(instance["model_instance_device_id"])
    visible = os.environ.get(_VISIBLE, "")
    os.environ[_VISIBLE] = visible.split(",")[ordinal] if visible else str(ordinal)
    return device_sm()

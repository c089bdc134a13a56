"""From a model instance to its engine: configuration, GPU, canaries."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import CONFIG, EchoEngine, greedy, open_echo
from trtc.protos.errors import EngineIncompatibleError, EnvironmentFault
from trtc.protos.manifest import Canary
from trtc.runtime.engine.config import EngineConfig, EngineSource
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.frontends.triton import opening

Opened = list[tuple[EngineSource, EngineConfig]]


def instance(
    parameters: dict[str, str], *, kind: str = "CPU", device: int = 0, **config: Any
) -> dict[str, str]:
    """What Triton gives a model instance."""
    config["parameters"] = {key: {"string_value": value} for key, value in parameters.items()}
    return {
        "model_config": json.dumps(config),
        "model_instance_kind": kind,
        "model_instance_device_id": str(device),
        "model_repository": "/models/coder",
        "model_version": "3",
        "model_name": "coder",
    }


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    calls: Opened = []

    def open_handle(source: EngineSource, config: EngineConfig) -> EngineHandle:
        calls.append((source, config))
        return open_echo(EchoEngine(), source.name, config)

    monkeypatch.setattr(opening, "open_handle", open_handle)
    return calls


@pytest.fixture
def sm(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return lambda value: monkeypatch.setattr(opening, "device_sm", lambda: value)


def open_and_close(instance: dict[str, str]) -> None:
    opening.open_deployment(instance, on_stats=lambda stats: None).close()


def test_parameters_reach_the_engine(opened: Opened) -> None:
    parameters = {"kv_bytes": "4096", "num_threads": "3", "max_queue": "5"}
    open_and_close(instance({"engine": "engine", "enable_kv_cache_reuse": "false", **parameters}))
    ((source, config),) = opened
    assert source == EngineSource("coder", Path("/models/coder/3/engine"))
    assert (config.kv_bytes, config.num_threads, config.max_queue) == (4096, 3, 5)
    assert not config.prefix_cache


def test_the_hosts_memory_reaches_the_engine(opened: Opened) -> None:
    for value in ("8192", ""):
        open_and_close(instance({"engine": "engine", "kv_cache_host_memory_bytes": value}))
    assert [config.kv_host_bytes for _, config in opened] == [8192, 0]


def test_the_instances_gpu_chooses_the_engine_and_is_the_only_one_seen(
    opened: Opened, sm: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = {"8.0": "sm_80", "9.0": "sm_90"}
    sm(90)
    open_and_close(instance({}, kind="GPU", device=2, cc_model_filenames=engines))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7f,6")
    sm(80)
    open_and_close(instance({}, kind="GPU", device=1, cc_model_filenames=engines))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-7f"
    assert [source.path.name for source, _ in opened] == ["sm_90", "sm_80"]


def test_without_a_gpu_nothing_is_opened(opened: Opened, sm: Callable[[int | None], None]) -> None:
    sm(None)
    with pytest.raises(EnvironmentFault, match="NVIDIA GPU"):
        open_and_close(instance({}, kind="GPU", cc_model_filenames={"9.0": "sm_90"}))
    assert opened == []


@pytest.mark.parametrize("right", [True, False])
def test_an_engine_whose_canaries_differ_does_not_serve(
    right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = greedy([5, 6], 4)
    canary = Canary(prompt_ids=(5, 6), token_ids=tuple(tokens if right else [1, *tokens[1:]]))
    handle = open_echo(replace(EchoEngine(), canaries=(canary,)), "coder", CONFIG.engine)
    monkeypatch.setattr(opening, "open_handle", lambda source, config: handle)
    if right:
        open_and_close(instance({"engine": "engine"}))
    else:
        with pytest.raises(EngineIncompatibleError, match="/3/engine: gives other tokens here"):
            open_and_close(instance({"engine": "engine"}))
    assert not handle.loop.healthy()

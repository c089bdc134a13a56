"""What a machine must have before anything of a CUDA engine is loaded."""

import sys
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.manifests import tiny_manifest
from trtc.protos.errors import (
    EngineCorruptError,
    EngineIncompatibleError,
    EnvironmentFault,
    TrtcError,
)
from trtc.protos.launch_plan import KernelCode, LaunchPlan, SamplingPlan, StepBlock, launches_json
from trtc.protos.manifest import FileFacts, Manifest, weights_files
from trtc.runtime.executors.cuda import loading, opening, sharded_opening
from trtc.runtime.executors.cuda.opening import prepare_cuda
from trtc.runtime.executors.cuda.sharded_opening import ShardedOpening
from trtc.runtime.executors.opening import OpenRequest


def manifest_of(*files: str, tp: int = 1) -> Manifest:
    manifest = tiny_manifest()
    target = msgspec.structs.replace(
        manifest.target, kind="cuda", name="cuda:sm_90", archs=("sm_90",), tp=tp
    )
    facts = FileFacts(sha256="0" * 64, bytes=1)
    return msgspec.structs.replace(manifest, target=target, files=dict.fromkeys(files, facts))


def request_of(engine: Path, *files: str, dummy_weights: bool = False) -> OpenRequest:
    return OpenRequest(engine, manifest_of(*files), None, dummy_weights)


class Result(IntEnum):
    """CUresult."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100


@dataclass
class Machine:
    """Two H200s, as their driver describes them; a test may change the facts."""

    driver: int = 13000
    visible: int = 2
    capability: dict[int, tuple[int, int]] = field(default_factory=lambda: {0: (9, 0), 1: (9, 0)})
    unreachable: tuple[tuple[int, int], ...] = ()
    free: int = 100 << 30
    init: int = 0
    contexts: int = 0

    def module(self) -> ModuleType:
        """As cuda.bindings.driver: status, then values."""
        module: Any = ModuleType("cuda.bindings.driver")
        module.CUresult = Result
        module.CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=SimpleNamespace(value=1))
        module.cuInit = lambda flags: (Result(self.init),)
        module.cuGetErrorString = lambda status: (0, b"no device")
        module.cuDriverGetVersion = lambda: (0, self.driver)
        module.cuDeviceGetCount = lambda: (0, self.visible)
        module.cuDeviceGet = lambda ordinal: (0, ordinal)
        module.cuDeviceGetName = lambda length, device: (0, b"NVIDIA H200\0".ljust(length))
        module.cuDeviceCanAccessPeer = lambda one, other: (0, (one, other) not in self.unreachable)
        module.cuDevicePrimaryCtxRetain = self._retain
        module.cuDevicePrimaryCtxRelease = self._release
        module.cuCtxSetCurrent = lambda context: (0,)
        module.cuStreamCreate = lambda flags: (0, 5)
        module.cuStreamDestroy = lambda stream: (0,)
        module.cuMemGetInfo = lambda: (0, self.free, 141 << 30)
        return module  # type: ignore[no-any-return]

    def sm(self, ordinal: int) -> int:
        major, minor = self.capability[ordinal]
        return 10 * major + minor

    def _retain(self, device: int) -> tuple[int, int]:
        self.contexts += 1
        return 0, 7

    def _release(self, device: int) -> tuple[int]:
        self.contexts -= 1
        return (0,)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", machine.module())
    monkeypatch.setattr(opening, "device_sm", machine.sm)
    return machine


def test_without_the_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(EnvironmentFault, match=r"cuda-bindings.*trtc\[cuda\]"):
        prepare_cuda(request_of(tmp_path))


def test_without_a_gpu(tmp_path: Path, gpu: Machine) -> None:
    gpu.init = 100
    with pytest.raises(EnvironmentFault, match=r"has no GPU to give .*NO_DEVICE") as caught:
        prepare_cuda(request_of(tmp_path))
    assert caught.value.field == "the CUDA driver"


def test_the_gpu_has_a_name(gpu: Machine) -> None:
    assert opening.device_name() == "NVIDIA H200"


def test_a_gpu_that_is_not_used_is_released(tmp_path: Path, gpu: Machine) -> None:
    ready = prepare_cuda(request_of(tmp_path))
    assert gpu.contexts == 1
    ready.close()
    assert gpu.contexts == 0


def test_a_driver_that_is_older_than_the_code(tmp_path: Path, gpu: Machine) -> None:
    gpu.driver = 12080
    with pytest.raises(EnvironmentFault, match=r"CUDA 12\.8.* needs 13\.0") as caught:
        prepare_cuda(request_of(tmp_path))
    assert caught.value.field == "NVIDIA driver"


def test_a_gpu_of_another_sm(tmp_path: Path, gpu: Machine) -> None:
    gpu.capability[0] = (8, 9)
    with pytest.raises(EngineIncompatibleError, match="sm_90, this GPU is sm_89") as caught:
        prepare_cuda(request_of(tmp_path))
    assert caught.value.field == "manifest.json: target.archs"
    assert "cuda:sm_89" in caught.value.remedy


def test_the_ledger_is_taken_off_before_the_pool(tmp_path: Path, gpu: Machine) -> None:
    request = request_of(tmp_path)
    ledger = request.manifest.ledger
    free = prepare_cuda(request).free_bytes()
    reserve = gpu.free - ledger.weights - ledger.activations - free
    assert reserve == loading._RESERVED_BYTES > 0


def test_all_code_and_tactics_are_verified(tmp_path: Path, gpu: Machine) -> None:
    listed = ("kernels/000-a.cubin", "tactics-0123.json", "graph.onnx", "launches.json")
    files = prepare_cuda(request_of(tmp_path, *listed)).files
    assert {"plan.json", "launches.json", "weights.safetensors", *listed[:2]} == set(files)
    without = prepare_cuda(request_of(tmp_path, *listed, dummy_weights=True)).files
    assert "weights.safetensors" not in without


def test_weights_that_are_on_the_host_are_not_read_again(tmp_path: Path, gpu: Machine) -> None:
    kept = np.arange(10, dtype=np.uint8)
    request = request_of(tmp_path)._replace(weights=kept)  # there is no file
    with loading._weights(request, 0) as weights:
        target = np.empty(4, np.uint8)
        weights.read(3, target)
    assert target.tolist() == [3, 4, 5, 6]


def test_code_that_the_manifest_does_not_list_is_refused(
    tmp_path: Path, gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be native code that nobody verified."""
    monkeypatch.setattr(
        loading, "GpuDevice", lambda gpu, seat: pytest.fail("the device was opened")
    )
    stray = KernelCode(file="kernels/stray.cubin", entry="x", num_threads=32, shared_bytes=0)
    plan = LaunchPlan(
        sm=90,
        split_keys=256,
        max_splits=64,
        kernels=(stray,),
        calls=(),
        sampling=SamplingPlan(stages={}, tensors={}, bytes=0),
        step=StepBlock(offsets={}, num_elements=1, table_width=1, max_rows=1),
        arena_bytes=0,
        scratch_bytes=0,
    )
    (tmp_path / "launches.json").write_bytes(launches_json(plan))
    ready = prepare_cuda(request_of(tmp_path, "launches.json"))
    with pytest.raises(EngineCorruptError, match="not listed") as caught:
        ready.open(4)
    assert "kernels/stray.cubin" in caught.value.field


class StandInGroup:
    """Two more ranks that are ready, and remember that they were let go."""

    def __init__(self, commands: Any) -> None:
        self.commands = commands
        self.closed = False

    def free_bytes(self) -> tuple[int, ...]:
        return (90 << 30,)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def sharded(tmp_path: Path, gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> OpenRequest:
    """An engine for the machine's two GPUs."""
    monkeypatch.setattr(sharded_opening, "RankGroup", StandInGroup)
    files = ("launches.json", "kernels/000-a.cubin", *weights_files(2))
    return OpenRequest(tmp_path, manifest_of(*files, tp=2), None, False)


def test_every_rank_has_a_process_but_the_first(sharded: OpenRequest) -> None:
    ready = prepare_cuda(sharded)
    assert isinstance(ready, ShardedOpening) and isinstance(ready.group, StandInGroup)
    ((interpreter, *rest),) = ready.group.commands
    assert interpreter == sys.executable
    assert rest == ["-m", "trtc.runtime.executors.cuda.rank", "1"]
    assert {"weights.rank0.safetensors", "weights.rank1.safetensors"} < set(ready.files)
    ready.close()
    assert ready.group.closed


def test_the_gpu_with_least_memory_decides_for_all(sharded: OpenRequest, gpu: Machine) -> None:
    ready = prepare_cuda(sharded)
    free = ready.free_bytes()
    gpu.free = 80 << 30
    assert ready.free_bytes() == free - (10 << 30)


@pytest.mark.parametrize(
    ("facts", "error", "message", "field"),
    [
        ({"visible": 1}, EnvironmentFault, "runs on 2 GPUs, and this machine shows 1", "tp"),
        (
            {"capability": {0: (9, 0), 1: (8, 0)}},
            EngineIncompatibleError,
            "sm_90, GPU 1 is sm_80",
            "archs",
        ),
        ({"unreachable": ((1, 0),)}, EnvironmentFault, "GPU 1 does not reach the memory", "tp"),
    ],
)
def test_gpus_that_do_not_suit_are_named(
    sharded: OpenRequest,
    gpu: Machine,
    facts: dict[str, Any],
    error: type[TrtcError],
    message: str,
    field: str,
) -> None:
    for name, fact in facts.items():
        setattr(gpu, name, fact)
    with pytest.raises(error, match=message) as caught:
        prepare_cuda(sharded)
    assert caught.value.field == f"manifest.json: target.{field}"


def test_one_gpu_need_not_be_all(tmp_path: Path, gpu: Machine) -> None:
    """A card that the engine does not use may be of any kind."""
    gpu.capability[1] = (7, 5)
    gpu.unreachable = ((0, 1), (1, 0))
    prepare_cuda(request_of(tmp_path))

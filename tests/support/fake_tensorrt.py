"""A TensorRT whose plans are ONNX files and whose engines are the reference evaluator.

`fake_tensorrt(...)` gives an object that stands in for the module `tensorrt` or `tensorrt_rtx`. It
offers only what the real binding has (test_api.py compares), keeps its rules, answers misuse as it
does (False or None, and a word to the logger), and does what it is asked on a FakeGpu.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from tests.support.bundles import NoReader, evaluable
from tests.support.fake_gpu import STREAM, FakeGpu
from trtc.builder.evaluator import Evaluator
from trtc.builder.module import TRTC_DOMAIN
from trtc.protos.dtypes import BY_ONNX

MAGIC = b"fake plan\n"
SCRATCH_BYTES = 1024

Shapes = list[list[int]]
"""min, opt, max."""


@dataclass
class Library:
    """What a test can set and see of the fake, beside its classes."""

    version: str
    is_rtx: bool
    gpu: FakeGpu
    plugins: set[str] = field(default_factory=set)
    """Registered with `tensorrt.plugin`."""
    deserialized: int = 0
    """Plans that were handed to a Runtime."""
    refitted: list[str] = field(default_factory=list)
    """ONNX files that stripped plans were refitted from."""


class DataType(Enum):
    FLOAT, HALF, INT8, INT32, BOOL, UINT8, FP8, BF16, INT64, INT4, FP4, E8M0 = range(12)


_TYPES = {"f32": "FLOAT", "bf16": "BF16", "f16": "HALF", "f8e4m3": "FP8", "i32": "INT32"}


class TensorIOMode(Enum):
    NONE, INPUT, OUTPUT = range(3)


class ExecutionContextAllocationStrategy(Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class BuilderFlag(IntEnum):
    REFIT, STRIP_PLAN, REFIT_IDENTICAL = range(3)


class MemoryPoolType(Enum):
    WORKSPACE = 0


class PreviewFeature(Enum):
    ALIASED_PLUGIN_IO_10_03 = 0


class NetworkDefinitionCreationFlag(IntEnum):
    STRONGLY_TYPED, PREFER_AOT_PYTHON_PLUGINS = 1, 3


class RtxNetworkDefinitionCreationFlag(IntEnum):
    STRONGLY_TYPED = 1


class ComputeCapability(Enum):
    SM75, SM80, SM86, SM89, SM120, SM121 = 75, 80, 86, 89, 120, 121


class EngineValidity(Enum):
    VALID, SUBOPTIMAL, INVALID = range(3)


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def log(self, severity: int, message: str) -> None:
        raise AssertionError(f"nobody listens to {message}")


class IProgressMonitor:
    pass


def fake_tensorrt(version: str, gpu: FakeGpu, *, is_rtx: bool = False) -> Any:
    """The module; `module.library` is the test's side of it."""
    library = Library(version, is_rtx, gpu)
    common: dict[str, Any] = {
        "__name__": "tensorrt_rtx" if is_rtx else "tensorrt",
        "__version__": version,
        "library": library,
        "DataType": DataType,
        "TensorIOMode": TensorIOMode,
        "ExecutionContextAllocationStrategy": ExecutionContextAllocationStrategy,
        "BuilderFlag": BuilderFlag,
        "MemoryPoolType": MemoryPoolType,
        "PreviewFeature": PreviewFeature,
        "NetworkDefinitionCreationFlag": RtxNetworkDefinitionCreationFlag
        if is_rtx
        else NetworkDefinitionCreationFlag,
        "ILogger": ILogger,
        "IProgressMonitor": IProgressMonitor,
        "Builder": lambda log: Builder(library, log),
        "OnnxParser": OnnxParser,
        "Runtime": lambda log: (RtxRuntime if is_rtx else Runtime)(library, log),
        "Refitter": Refitter,
        "OnnxParserRefitter": OnnxParserRefitter,
    }
    if is_rtx:
        common |= {"ComputeCapability": ComputeCapability, "EngineValidity": EngineValidity}
    return SimpleNamespace(**common)


def fake_plugin_module(trt: Any) -> Any:
    """`tensorrt.plugin`: it remembers what is registered, and calls nothing."""

    def register(name: str, *, lazy_register: bool) -> Any:
        assert not lazy_register
        trt.library.plugins.add(name)
        return lambda function: function

    def decorate(name: str) -> Any:
        assert name in trt.library.plugins
        return lambda function: function

    names = ("TensorDesc", "AutoTuneCombination", "KernelLaunchParams", "SymExprs")
    classes = {name: type(name, (), {}) for name in names}
    return SimpleNamespace(register=register, autotune=decorate, aot_impl=decorate, **classes)


# Building.


@dataclass
class INetworkDefinition:
    library: Library
    flags: int
    path: Path | None = None
    model: onnx.ModelProto | None = None

    @property
    def num_inputs(self) -> int:
        return len(self._graph.input)

    def get_input(self, index: int) -> "ITensor":
        return ITensor(self._graph.input[index])

    @property
    def _graph(self) -> onnx.GraphProto:
        assert self.model is not None
        return self.model.graph


class ITensor:
    def __init__(self, info: onnx.ValueInfoProto) -> None:
        self.name = info.name
        self._dims = info.type.tensor_type.shape.dim
        self.shape = _shape(info)

    def get_dimension_name(self, index: int) -> str:
        return str(self._dims[index].dim_param)


class OnnxParser:
    def __init__(self, network: INetworkDefinition, log: ILogger) -> None:
        self._network = network
        self._error = ""
        self._node = ""

    def parse_from_file(self, path: str) -> bool:
        network = self._network
        network.path = Path(path)
        network.model = onnx.load(path, load_external_data=True)
        for node in network.model.graph.node:
            if node.domain == TRTC_DOMAIN:
                name = f"{node.domain}::{node.op_type}"
                if network.library.is_rtx or name not in network.library.plugins:
                    self._error, self._node = f"no plugin {name}", node.name
                    return False
        return True

    @property
    def num_errors(self) -> int:
        return 1 if self._error else 0

    def get_error(self, index: int) -> "ParserError":
        return ParserError(self._error, self._node)


@dataclass
class ParserError:
    _text: str
    _node: str

    def desc(self) -> str:
        return self._text

    def node_name(self) -> str:
        return self._node

    def node_operator(self) -> str:
        return ""


class IOptimizationProfile:
    def __init__(self) -> None:
        self._shapes: dict[str, Shapes] = {}

    def set_shape(self, name: str, least: Any, best: Any, most: Any) -> None:
        assert all(a <= b <= c for a, b, c in zip(least, best, most, strict=True))
        self._shapes[name] = [list(least), list(best), list(most)]


class ITimingCache:
    def __init__(self, blob: bytes) -> None:
        self._blob = blob

    def serialize(self) -> bytes:
        return self._blob + b"timed "


class IBuilderConfig:
    def __init__(self) -> None:
        self.builder_optimization_level = 3
        self.progress_monitor: Any = None
        self.num_compute_capabilities = 0
        self._capabilities: dict[int, ComputeCapability] = {}
        self._profiles: list[dict[str, Shapes]] = []
        self._flags: set[BuilderFlag] = set()
        self._cache: ITimingCache | None = None

    def set_memory_pool_limit(self, pool: MemoryPoolType, size: int) -> None:
        pass

    def set_preview_feature(self, feature: PreviewFeature, enable: bool) -> None:
        pass

    def set_flag(self, flag: BuilderFlag) -> None:
        self._flags.add(flag)

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self._profiles.append(profile._shapes)
        return len(self._profiles) - 1

    def create_timing_cache(self, blob: bytes) -> ITimingCache:
        return ITimingCache(blob)

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        self._cache = cache
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        return self._cache

    def set_compute_capability(self, capability: ComputeCapability, index: int) -> bool:
        self._capabilities[index] = capability
        return index < self.num_compute_capabilities


class Builder:
    def __init__(self, library: Library, log: ILogger) -> None:
        self._library = library
        self._log = log

    def create_network(self, flags: int) -> INetworkDefinition:
        return INetworkDefinition(self._library, flags)

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(
        self, network: INetworkDefinition, config: IBuilderConfig
    ) -> bytes | None:
        """Weights inside, unless they are to be stripped."""
        model = network.model
        assert model is not None and config._profiles
        inputs = {info.name for info in model.graph.input}
        assert all(set(profile) == inputs for profile in config._profiles)
        config.progress_monitor.phase_start("Building Engine", None, 1)
        config.progress_monitor.step_complete("Building Engine", 0)
        config.progress_monitor.phase_finish("Building Engine")
        stripped = BuilderFlag.STRIP_PLAN in config._flags
        if stripped and self._library.is_rtx:
            self._log.log(ILogger.ERROR, "Myelin: no CUDA device")
            return None
        if stripped:
            for tensor in model.graph.initializer:
                tensor.ClearField("raw_data")
        header = {
            "version": self._library.version,
            "profiles": config._profiles,
            "sms": [one.value for one in config._capabilities.values()],
            "stripped": stripped,
        }
        line = json.dumps(header).encode() + b"\n"
        return MAGIC + line + model.SerializeToString(deterministic=True)


# Running.


class Runtime:
    def __init__(self, library: Library, log: ILogger) -> None:
        self._library = library
        self._log = log

    def deserialize_cuda_engine(self, plan: Any) -> "ICudaEngine | None":
        self._library.deserialized += 1
        content = bytes(memoryview(plan))
        if not content.startswith(MAGIC):
            self._log.log(ILogger.ERROR, "not a plan")
            return None
        line, _, graph = content[len(MAGIC) :].partition(b"\n")
        header = json.loads(line)
        if header["version"] != self._library.version:
            self._log.log(ILogger.ERROR, f"a plan of {header['version']}")
            return None
        return ICudaEngine(self._library, self._log, header, onnx.ModelProto.FromString(graph))


class RtxRuntime(Runtime):
    def get_engine_validity(self, buffer: Any) -> tuple[EngineValidity, int]:
        header = json.loads(bytes(memoryview(buffer))[len(MAGIC) :].partition(b"\n")[0])
        valid = header["version"] == self._library.version
        return (EngineValidity.VALID, 0) if valid else (EngineValidity.INVALID, 4)


class ICudaEngine:
    def __init__(
        self, library: Library, log: ILogger, header: Mapping[str, Any], model: onnx.ModelProto
    ) -> None:
        self._library = library
        self._log = log
        self._profiles: list[dict[str, Shapes]] = header["profiles"]
        self._model = model
        self._infos = {info.name: info for info in [*model.graph.input, *model.graph.output]}
        self._inputs = [info.name for info in model.graph.input]
        self.refittable = bool(header["stripped"])
        self._evaluator: Evaluator | None = None
        if not self.refittable:
            self._evaluator = Evaluator(evaluable(model), NoReader())

    @property
    def num_io_tensors(self) -> int:
        return len(self._infos)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self._infos)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self._inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[_TYPES[_dtype(self._infos[name])]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return _shape(self._infos[name])

    @property
    def device_memory_size_v2(self) -> int:
        return SCRATCH_BYTES * self.num_optimization_profiles

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return SCRATCH_BYTES * (1 + profile_index)

    def create_execution_context(
        self, strategy: ExecutionContextAllocationStrategy
    ) -> "IExecutionContext":
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        make = RtxIExecutionContext if self._library.is_rtx else IExecutionContext
        return make(self)


class IExecutionContext:
    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine
        self._gpu = engine._library.gpu
        self._profile: int | None = None
        self._scratch: tuple[int, int] | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._settled: dict[str, tuple[int, ...]] | None = None
        """Shapes of the last run that was no capture."""

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        self._profile = profile_index
        return profile_index < self._engine.num_optimization_profiles

    def set_device_memory(self, memory: int, size: int) -> None:
        self._scratch = (memory, size)

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self._engine._infos or memory % 256:
            return self._fail(f"a bad address for {name}")
        self._addresses[name] = memory
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._profile is not None
        least, _, most = self._engine._profiles[self._profile][name]
        if not all(a <= n <= b for a, n, b in zip(least, shape, most, strict=True)):
            return self._fail(f"{name} {shape} is outside profile {self._profile}")
        self._shapes[name] = tuple(shape)
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self._engine._inputs if name not in self._shapes]

    def execute_async_v3(self, stream_handle: int) -> bool:
        """Freeze shapes and addresses and put the run on the stream."""
        assert stream_handle == STREAM and self._profile is not None
        if set(self._addresses) != set(self._engine._infos) or self.infer_shapes():
            return self._fail("not every tensor has an address and a shape")
        need = self._engine.get_device_memory_size_for_profile_v2(self._profile)
        if self._scratch is None or self._scratch[0] % 256 or self._scratch[1] < need:
            return self._fail("no scratch memory")
        if self._engine._evaluator is None:
            return self._fail("the weights are missing: refit the engine")
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        if self._gpu.is_capturing and shapes != self._settled:
            return self._fail("shapes have not settled: operation not permitted when capturing")
        if not self._gpu.is_capturing:
            self._settled = shapes
        event = f"execute profile {self._profile}"
        scratch = self._scratch
        self._gpu.enqueue(event, lambda: self._run(shapes, addresses, scratch))
        return True

    def _run(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        addresses: Mapping[str, int],
        scratch: tuple[int, int],
    ) -> None:
        engine, gpu = self._engine, self._gpu
        gpu.view(*scratch).fill(0xA5)
        inputs: dict[str, NDArray[Any]] = {
            name: gpu.array(addresses[name], _dtype(engine._infos[name]), shapes[name]).copy()
            for name in engine._inputs
        }
        assert engine._evaluator is not None
        for name, values in engine._evaluator.run(inputs).items():
            wanted = engine.get_tensor_shape(name)
            assert all(a in (-1, b) for a, b in zip(wanted, values.shape, strict=True))
            target = gpu.array(addresses[name], _dtype(engine._infos[name]), values.shape)
            np.copyto(target, values)

    def _fail(self, reason: str) -> bool:
        self._engine._log.log(ILogger.ERROR, reason)
        return False


class RtxIExecutionContext(IExecutionContext):
    def is_stream_capturable(self, stream: int) -> bool:
        """Not before its kernels are compiled, which begins with the first run."""
        return self._settled is not None


class Refitter:
    def __init__(self, engine: ICudaEngine, logger: ILogger) -> None:
        assert engine.refittable, "REFIT was not set when the plan was built"
        self._engine = engine
        self._weights: dict[str, onnx.TensorProto] = {}

    def get_missing_weights(self) -> list[str]:
        names = (tensor.name for tensor in self._engine._model.graph.initializer)
        return [name for name in names if name not in self._weights]

    def refit_cuda_engine(self) -> bool:
        if self.get_missing_weights():
            return False
        model = self._engine._model
        kept = [self._weights[tensor.name] for tensor in model.graph.initializer]
        del model.graph.initializer[:]
        model.graph.initializer.extend(kept)
        self._engine._evaluator = Evaluator(evaluable(model), NoReader())
        return True


class OnnxParserRefitter:
    def __init__(self, refitter: Refitter, logger: ILogger) -> None:
        self._refitter = refitter
        self._error = ""

    def refit_from_file(self, model: str) -> bool:
        graph = onnx.load(model, load_external_data=True).graph
        given = {tensor.name: tensor for tensor in graph.initializer}
        wanted = self._refitter._engine._model.graph.initializer
        for tensor in wanted:
            if tensor.name not in given or tensor.dims != given[tensor.name].dims:
                self._error = tensor.name
                return False
        self._refitter._weights = {tensor.name: given[tensor.name] for tensor in wanted}
        self._refitter._engine._library.refitted.append(model)
        return True

    @property
    def num_errors(self) -> int:
        return 1 if self._error else 0

    def get_error(self, index: int) -> ParserError:
        return ParserError("weights do not fit", self._error)


def _shape(info: onnx.ValueInfoProto) -> tuple[int, ...]:
    return tuple(-1 if dim.dim_param else dim.dim_value for dim in info.type.tensor_type.shape.dim)


def _dtype(info: onnx.ValueInfoProto) -> str:
    return BY_ONNX[info.type.tensor_type.elem_type].name

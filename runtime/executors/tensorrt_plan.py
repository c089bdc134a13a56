"""One deserialised plan: a context for each profile, with fixed addresses of tensors.

Contexts share their scratch memory, because an engine runs one at a time. The caller must have
verified the file: a plan is native code.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trtc.protos.errors import EngineIncompatibleError, EnvironmentFault, InvariantError
from trtc.protos.stages import Segment
from trtc.runtime.executors.tensorrt_step import Shape, resolve

TRT_TYPES: Mapping[str, str] = {
    "f32": "FLOAT",
    "bf16": "BF16",
    "f16": "HALF",
    "f8e4m3": "FP8",
    "i32": "INT32",
}
"""trtc's dtype -> name in trt.DataType."""


class LoadedPlan:
    """A segment's plan on the device. TensorRT's calls report failure by their return values."""

    def __init__(
        self,
        trt: Any,
        log: Any,
        engine: Any,
        segment: Segment,
        tensors: Mapping[str, tuple[str, Shape]],
        stream: int,
    ) -> None:
        """Create the contexts.

        Args:
            log: logger of make_logger, with the reason of the last failure.
            engine: an ICudaEngine.
            tensors: element type and shape of every tensor of the step.

        Raises:
            EngineIncompatibleError: the plan has other tensors than the segment.
            EnvironmentFault: the library gives no context.
        """
        self._log = log
        self._segment = segment
        self._engine = engine
        self._stream = stream
        self._shapes = {name: tensors[name][1] for name in segment.inputs}
        self._check_tensors(trt, tensors)
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self._contexts = [
            self._must(engine.create_execution_context(strategy), "give a context")
            for _ in range(engine.num_optimization_profiles)
        ]

    @property
    def scratch_bytes(self) -> int:
        """Scratch bytes of the profile that needs most."""
        profiles = range(self._engine.num_optimization_profiles)
        return max(int(self._engine.get_device_memory_size_for_profile_v2(p)) for p in profiles)

    def bind(self, addresses: Mapping[str, int], scratch: int, size: int) -> None:
        """Set the profile, scratch memory and all addresses of every context."""
        names = (*self._segment.inputs, *self._segment.outputs)
        for profile, context in enumerate(self._contexts):
            self._must(
                context.set_optimization_profile_async(profile, self._stream),
                f"take profile {profile}",
            )
            context.set_device_memory(scratch, size)
            for name in names:
                self._must(
                    context.set_tensor_address(name, addresses[name]), f"take an address for {name}"
                )

    def enqueue(self, profile: int, extents: Mapping[str, int]) -> None:
        """Enqueue one execution."""
        context = self._contexts[profile]
        for name, shape in self._shapes.items():
            sizes = resolve(shape, extents)
            self._must(context.set_input_shape(name, sizes), f"take {name} of shape {sizes}")
        unknown = context.infer_shapes()
        if unknown:
            raise InvariantError(f"{self._segment.plan} wants shapes of {', '.join(unknown)}")
        self._must(context.execute_async_v3(self._stream), "execute")

    def can_be_captured(self, profile: int) -> bool:
        """Whether a profile can be captured: not while TensorRT for RTX compiles kernels (JIT)."""
        ask = getattr(self._contexts[profile], "is_stream_capturable", None)
        return ask is None or bool(ask(self._stream))

    def close(self) -> None:
        """Free the contexts, then the engine."""
        self._contexts.clear()
        self._engine = None

    def _must(self, answer: Any, what: str) -> Any:
        if not answer:
            raise EnvironmentFault(
                f"could not {what}: {self._log.last_error}",
                field=self._segment.plan,
                remedy="Restart the server; if it happens again, build the engine again",
            )
        return answer

    def _check_tensors(self, trt: Any, tensors: Mapping[str, tuple[str, Shape]]) -> None:
        engine, segment = self._engine, self._segment
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        for wanted, mode in (
            (segment.inputs, trt.TensorIOMode.INPUT),
            (segment.outputs, trt.TensorIOMode.OUTPUT),
        ):
            found = {name for name in names if engine.get_tensor_mode(name) == mode}
            if found != set(wanted):
                odd = ", ".join(sorted(found.symmetric_difference(wanted)))
                raise self._other(f"the plan and stages.json differ in {odd}")
        for name in names:
            dtype, shape = tensors[name]
            if engine.get_tensor_dtype(name) != getattr(trt.DataType, TRT_TYPES[dtype]):
                raise self._other(f"{name} is {engine.get_tensor_dtype(name)}, not {dtype}")
            if not _fits(tuple(engine.get_tensor_shape(name)), shape):
                raise self._other(
                    f"{name} has shape {tuple(engine.get_tensor_shape(name))}, not {shape}"
                )

    def _other(self, problem: str) -> EngineIncompatibleError:
        return EngineIncompatibleError(
            problem,
            field=self._segment.plan,
            remedy="Build the engine again",
        )


def _fits(found: Sequence[int], wanted: Shape) -> bool:
    """Whether shapes match; dynamic axes are -1 in a plan."""
    return len(found) == len(wanted) and all(
        axis == -1 if isinstance(extent, str) else axis == extent
        for axis, extent in zip(found, wanted, strict=True)
    )

"""Where a CUDA engine parts from the operators' references: one step, call by call.

The references run the engine's own plan on the host, each call on what the one before it gave;
the GPU does the same. So an error is what has come together up to a call, not what the call adds.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.bench.gpu_operators import CallOnDevice, as_tensor, send_step, step_input
from trtc.plugins.registry import REGISTRY
from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.protos.manifest import PLAN_FILE, WEIGHTS_FILE
from trtc.protos.plan import Argument, Call, Plan, read_plan
from trtc.runtime.engine.probe import solo_batch
from trtc.runtime.executors.base import StepBatch
from trtc.runtime.executors.cuda.buckets import fitting_variants
from trtc.runtime.executors.cuda.executor import CudaExecutor
from trtc.runtime.executors.weights import map_weights

Array = np.ndarray[Any, np.dtype[Any]]
_LAYER = re.compile(r"layers\.(\d+)\..*")


class HostPlan:
    """A CUDA engine's plan, done by the operators' references over an empty pool."""

    def __init__(self, engine: Path, num_pages: int) -> None:
        self.plan: Plan = read_plan(engine / PLAN_FILE)
        self._weights = {weight.name: weight for weight in self.plan.weights}
        self._data = map_weights(engine / WEIGHTS_FILE, self.plan.weights_bytes)
        kv = self.plan.kv
        self._pools = {
            one.name: np.zeros(
                (num_pages, *kv.pool_shape(one)[1:]), NUMPY_DTYPES[one.entry.element]
            )
            for one in kv.places
        }
        self._tensors: dict[str, Array] = {}

    def step(self, batch: StepBatch) -> Iterator[tuple[Call, dict[str, Array]]]:
        """Every call in turn, with what it gave, by parameter."""
        for call in self.plan.calls:
            operator = REGISTRY[call.operator]
            arguments = {one.parameter: one for one in call.arguments}
            given = {
                parameter.name: self._read(arguments[parameter.name], batch)
                if parameter.name in arguments
                else None
                for parameter in operator.inputs
            }
            results = operator.reference(**given, **call.attributes)
            outputs = {
                parameter.name: value
                for parameter, value in zip(operator.outputs, results, strict=False)
                if parameter.name in arguments
            }
            for name, value in outputs.items():
                self._write(arguments[name], value)
            yield call, outputs

    def logits(self, batch: StepBatch) -> Array:
        """[R, vocabulary] of a whole step."""
        (*_, (_, outputs)) = self.step(batch)
        (logits,) = outputs.values()
        return logits

    def _read(self, argument: Argument, batch: StepBatch) -> Array:
        match argument.kind:
            case "step":
                return step_input(batch, argument, max(1, len(self.plan.kv.groups)))
            case "pool":
                return self._pools[argument.name]
            case "weight":
                weight = self._weights[argument.name]
                data = self._data[weight.offset : weight.offset + weight.bytes]
                return as_tensor(data, weight.dtype, weight.shape)
            case _:
                begin = argument.column_offset
                return self._tensors[argument.name][:, begin : begin + argument.columns]

    def _write(self, argument: Argument, value: Array) -> None:
        if argument.kind == "pool":
            self._pools[argument.name] = value
            return
        shape = (len(value), argument.row_stride)
        if argument.name not in self._tensors or self._tensors[argument.name].shape != shape:
            self._tensors[argument.name] = np.zeros(shape, NUMPY_DTYPES[argument.dtype])
        begin = argument.column_offset
        self._tensors[argument.name][:, begin : begin + argument.columns] = value


@dataclass(frozen=True)
class Error:
    """One call of a step."""

    site: str
    relative: float
    """|found - expected| / |expected| over all of its outputs but pools."""


def errors_by_call(engine: Path, executor: CudaExecutor, tokens: Sequence[int]) -> Iterator[Error]:
    """A prefill of `tokens`, on the GPU and on the host."""
    batch = solo_batch(executor, np.asarray(tokens, np.int32), 0, np.array([len(tokens) - 1]))
    host = HostPlan(engine, executor.num_pages)
    bucket = send_step(executor, batch)
    for (call, outputs), launched in zip(host.step(batch), executor.program.calls, strict=True):
        one = CallOnDevice(host.plan, call, launched, executor)
        _, variant = next(fitting_variants(launched, bucket))
        executor.program.run_call(launched, variant, bucket)
        squares = np.zeros(2)
        for argument in call.arguments:
            if argument.parameter in outputs and argument.kind != "pool":
                expected = outputs[argument.parameter].astype(np.float64)
                found = one.read(argument, batch).astype(np.float64)
                squares += ((found - expected) ** 2).sum(), (expected**2).sum()
        if squares[1]:
            relative = float(np.sqrt(squares[0] / squares[1]))
            yield Error(call.site, relative if math.isfinite(relative) else math.inf)


def describe(errors: Iterable[Error], tolerance: float) -> Iterator[str]:
    """The largest error of each layer, and the first call beyond the tolerance."""
    by_layer: dict[str, float] = {}
    first = None
    for error in errors:
        layer = _LAYER.sub(r"layer \1", error.site)
        by_layer[layer] = max(by_layer.get(layer, 0.0), error.relative)
        if first is None and error.relative > tolerance:
            first = error
    yield ", ".join(f"{layer} {relative:.4f}" for layer, relative in by_layer.items())
    if first is not None:
        yield f"first beyond {tolerance:.4f}: {first.site} ({first.relative:.4f})"

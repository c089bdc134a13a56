"""Checks every kernel of a CUDA engine on its GPU against the operators' references.

Each kind of call of the engine runs in each of its variants, over ragged batches with stale rows
behind them, on fresh random inputs with poisoned outputs, from the engine's own cubins; the slow
references of `plugins/*/reference.py` read the very bytes that the kernels read.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from trtc.plugins.kv_pool import PagedHeads
from trtc.plugins.latents.expansion import expanded_sequences
from trtc.plugins.op import FusedOp
from trtc.plugins.registry import REGISTRY
from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.protos.dtypes import DTYPES
from trtc.protos.launch_plan import CallLaunches, CallVariant, read_launches
from trtc.protos.manifest import PLAN_FILE, Manifest
from trtc.protos.plan import Argument, Call, Plan, read_plan
from trtc.protos.step import STEP_INPUTS, group_input
from trtc.runtime.executors.base import StepBatch
from trtc.runtime.executors.cuda.buckets import Bucket, fitting_variants
from trtc.runtime.executors.cuda.device import Place
from trtc.runtime.executors.cuda.executor import CudaExecutor
from trtc.runtime.executors.cuda.step_inputs import fill_step

Array = np.ndarray[Any, np.dtype[Any]]
POISON = 0xFF
"""NaN in every floating-point type."""
_CHOOSING = ("select_tokens",)
"""Operators that choose by scores: of small whole numbers, whose sums are exact, so that no choice
is a matter of rounding."""
_WITH_SCALES = ("i8", "u8")
"""Pools whose heads have scales of their own."""
_ROUNDING = {"paged_attention": 2.0**-7, "linear": 2.0**-8, "gated_linear": 2.0**-7}
_OF_4_BITS = ("linear", "fused_linear")
_ROUNDING_OF_4_BITS = 2.0**-7
"""Of a row's largest result, allowed beside an operator's own tolerance: tensor cores round softmax
weights to bf16, and add E4M3 products in fewer bits than f32 has; 4-bit weights are rounded to bf16
before they are multiplied. A sum that cancels shows it, and a product of two sums both."""
_E4M3_STEP_ROUNDING = 2.0**-15
"""Of the largest result as well, if K is long: what each 32 of K may drop of a sum of E4M3 products
that stays in the tensor cores, which keep 14 bits. With K = 14336 cuBLASLt's are up to 0.8% off."""
STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((1, 1),),
    ((33, 1), (700, 1), (256, 1)),
    ((1, 1), (300, 1), (77, 77), (150, 40), (500, 3), (129, 129)),
    tuple((40 + 7 * number, 1) for number in range(20)),
    ((600, 600), (18, 1)),
)
"""Batches: (context after the step, new tokens) of each sequence."""


@dataclass(frozen=True)
class Finding:
    """One variant of one kind of call on one batch."""

    operator: str
    site: str
    variant: int
    tokens: int
    worst: float
    """Largest error as a share of the tolerance; above 1 is wrong."""
    problem: str = ""

    @property
    def good(self) -> bool:
        return not self.problem and self.worst <= 1


def check_operators(engine: Path, manifest: Manifest, executor: CudaExecutor) -> Iterator[Finding]:
    """Every kind of call, every variant, every batch that the engine's limits allow."""
    plan, launches = read_plan(engine / PLAN_FILE), read_launches(engine)
    seen: set[str] = set()
    for call, launched in zip(plan.calls, launches.calls, strict=True):
        key = json.dumps(
            [call.operator, call.attributes, call.axes]
            + [(one.parameter, one.dtype, one.row_stride) for one in call.arguments],
            sort_keys=True,
        )
        if key in seen:
            continue
        seen.add(key)
        checker = CallOnDevice(plan, call, launched, executor)
        for batch in STEPS:
            if _fits(batch, manifest):
                yield from checker.check(batch)


def _fits(batch: tuple[tuple[int, int], ...], manifest: Manifest) -> bool:
    limits = manifest.limits
    return (
        len(batch) <= limits.max_batch_size
        and sum(new for _, new in batch) <= limits.max_num_tokens
        and max(context for context, _ in batch) <= limits.max_seq_len
    )


class CallOnDevice:
    """One call: its tensors on the device, and its reference."""

    def __init__(
        self,
        plan: Plan,
        call: Call,
        launched: CallLaunches,
        executor: CudaExecutor,
    ) -> None:
        self.plan = plan
        self.call = call
        self.launched = launched
        self.executor = executor
        self.operator: FusedOp = REGISTRY[call.operator]
        self.layout = executor.layout
        self.random = np.random.default_rng(7)
        self.offsets = {buffer.name: buffer.offset for buffer in plan.buffers}
        self.weights = {weight.name: weight for weight in plan.weights}

    def check(self, sequences: tuple[tuple[int, int], ...]) -> Iterator[Finding]:
        batch = ragged_batch(self.executor, sequences, self.random)
        bucket = self.executor.bucket_of(batch)
        for number, variant in fitting_variants(self.launched, bucket):
            yield self._check_variant(number, variant, bucket, batch)

    def _check_variant(
        self, number: int, variant: CallVariant, bucket: Bucket, batch: StepBatch
    ) -> Finding:
        program = self.executor.program
        for memory in (program.spaces[name] for name in ("arena", "scratch", "logits")):
            self._send(Place(memory, 0), np.full(memory.num_bytes, POISON, np.uint8))
        send_step(self.executor, batch)
        inputs = {one.name for one in self.operator.inputs}
        for argument in self.call.arguments:
            if argument.parameter == "selected" and argument.parameter in inputs:
                self._select(argument, batch)
            elif argument.parameter in inputs and argument.kind in ("buffer", "pool"):
                self._randomise(argument, bucket)
        given = {
            parameter.name: self.read(argument, batch) if argument else None
            for parameter in self.operator.inputs
            for argument in [self._argument(parameter.name)]
        }
        program.run_call(self.launched, variant, bucket)
        expected = self.operator.reference(**given, **self.call.attributes)
        worst, problem = 0.0, ""
        tolerance = self.operator.tolerances[self._output_dtype()]
        rows = self._written(batch)
        for parameter, value in zip(self.operator.outputs, expected, strict=False):
            output = self._argument(parameter.name)
            if output is None:
                continue
            found = self._numbers(output, self.read(output, batch))[rows]
            wanted = self._numbers(output, np.asarray(value))[rows]
            if not np.isfinite(found).all():
                problem = f"{parameter.name} is not finite"
                continue
            allowed = tolerance.absolute + tolerance.relative * np.abs(wanted)
            if wanted.ndim == 2:
                largest = np.abs(wanted).max(axis=1, keepdims=True, initial=0.0)
                allowed = allowed + self._rounding() * largest
            errors = np.abs(found - wanted)
            ratio = np.divide(
                errors, allowed, out=np.where(errors > 0, np.inf, 0.0), where=allowed > 0
            )
            worst = max(worst, float(ratio.max(initial=0.0)))
        return Finding(
            self.call.operator, self.call.site, number, len(batch.token_ids), worst, problem
        )

    def _written(self, batch: StepBatch) -> slice | Array:
        """Which rows of an output the call writes: latent_attention leaves those of sequences that
        are expanded to expanded_latent_attention."""
        if self.call.operator != "latent_attention":
            return slice(None)
        written = np.ones(len(batch.token_ids), bool)
        names = ("least_new", "room", "most_context")
        expansion = (int(self.call.attributes[name]) for name in names)
        for one in expanded_sequences(batch.query_start, batch.context_lens, *expansion):
            written[batch.query_start[one] : batch.query_start[one + 1]] = False
        return written

    def _numbers(self, argument: Argument, array: Array) -> Array:
        """f64 of a tensor, or of what a pool's codes and scales stand for."""
        if argument.kind == "pool" and argument.dtype in _WITH_SCALES:
            return self._heads(array).read_all().astype(np.float64)
        return array.astype(np.float64)

    def _heads(self, pool: Array) -> PagedHeads:
        return PagedHeads(pool, int(self.call.attributes["head_dim"]))

    def _rounding(self) -> float:
        is_narrow = self.call.attributes.get("weight_dtype") in ("i4", "u4", "iq4", "f4e2m1")
        if self.call.operator in _OF_4_BITS and is_narrow:
            return _ROUNDING_OF_4_BITS * (1 + int(self.call.attributes.get("gated", 0)))
        rounding = _ROUNDING.get(self.call.operator, 0.0)
        x = self._argument("x")
        if self.call.operator == "linear" and x is not None and x.dtype == "f8e4m3":
            return max(rounding, int(self.call.axes["K"]) / 32 * _E4M3_STEP_ROUNDING)
        return rounding

    def _output_dtype(self) -> str:
        first = self._argument(self.operator.outputs[0].name)
        assert first is not None
        return first.dtype

    def _argument(self, parameter: str) -> Argument | None:
        return next((one for one in self.call.arguments if one.parameter == parameter), None)

    def _place(self, argument: Argument) -> Place:
        spaces = self.executor.program.spaces
        match argument.kind:
            case "buffer":
                return Place(spaces["arena"], self.offsets[argument.name])
            case "weight":
                return Place(spaces["weights"], self.weights[argument.name].offset)
            case "logits":
                return Place(spaces["logits"], 0)
            case "pool":
                return Place(spaces["pool"], self.executor.program.regions[argument.index])
            case "step":
                name = group_input(argument.name, argument.index)
                return Place(spaces["step"], 4 * self.layout.offsets[name])

    def _send(self, place: Place, data: Array) -> None:
        self.executor.program.device.send(np.ascontiguousarray(data).view(np.uint8), place)

    def _randomise(self, argument: Argument, bucket: Bucket) -> None:
        if argument.kind == "pool":
            count = self.executor.num_pages * self.plan.kv.region_bytes[argument.index]
            count //= DTYPES[argument.dtype].num_bytes(1)
        else:
            rows = bucket.rows if self._axis(argument) == "R" else bucket.tokens
            count = rows * argument.row_stride
        if self.call.operator in _CHOOSING:
            whole = self.random.integers(-2, 3, count).astype(np.float32)
            values = whole.astype(NUMPY_DTYPES[argument.dtype])
        else:
            values = random_values(self.random, argument.dtype, count)
        if argument.kind == "pool" and argument.dtype in _WITH_SCALES:
            (entry,) = (one for one in self.plan.kv.places if one.name == argument.name)
            shape = [int(extent) for extent in self.plan.kv.pool_shape(entry)[1:]]
            scales = self._heads(values.reshape(-1, *shape)).scales
            assert scales is not None
            scales[...] = self.random.uniform(0.005, 0.03, scales.shape)
        self._send(self._place(argument), values.view(np.uint8))

    def _select(self, argument: Argument, batch: StepBatch) -> None:
        """Slots as select_tokens gives them, chosen at random."""
        size, top_k = self.executor.kv.page_size, argument.columns
        table = self._argument("page_table")
        assert table is not None
        tables = step_input(batch, table, self.layout.num_groups)
        chosen = np.full((len(batch.token_ids), argument.row_stride), -1, np.int32)
        places = zip(batch.query_start[:-1], batch.query_start[1:], batch.context_lens, strict=True)
        for sequence, (begin, end, context) in enumerate(places):
            for row in range(begin, end):
                seen = int(context) - (int(end) - row) + 1
                positions = np.sort(self.random.permutation(seen)[:top_k])
                pages = tables[sequence][positions // size]
                chosen[row, : len(positions)] = pages * size + positions % size
        self._send(self._place(argument), chosen.reshape(-1))

    def _axis(self, argument: Argument) -> int | str:
        """T or R: what the tensor has rows of."""
        parameter = next(p for p in self.operator.parameters if p.name == argument.parameter)
        return self.call.axes.get(parameter.axes[0], parameter.axes[0])

    def read(self, argument: Argument, batch: StepBatch) -> Array:
        """The tensor's real rows."""
        place = self._place(argument)
        if argument.kind == "step":
            return step_input(batch, argument, self.layout.num_groups)
        if argument.kind == "pool":
            return self._read_pool(argument)
        if argument.kind == "weight":
            shape: tuple[int, ...] = self.weights[argument.name].shape
        else:
            real = batch.logit_rows if self._axis(argument) == "R" else batch.token_ids
            shape = (len(real), argument.row_stride)
        dtype = DTYPES[argument.dtype]
        size = dtype.num_bytes(int(np.prod(shape)))
        data = self.executor.program.device.fetch(place, size).wait()
        array = as_tensor(data, dtype.name, shape)
        if argument.kind in ("buffer", "logits"):
            array = array[:, argument.column_offset : argument.column_offset + argument.columns]
        return array

    def _read_pool(self, argument: Argument) -> Array:
        """An entry's part of its region: of a state some columns of every page's row."""
        kv, num_pages = self.plan.kv, self.executor.num_pages
        entry = next(one for one in kv.places if one.name == argument.name)
        num_bytes = kv.region_bytes[entry.region] * num_pages
        data = self.executor.program.device.fetch(self._place(argument), num_bytes).wait()
        rows = data.view(NUMPY_DTYPES[argument.dtype]).reshape(num_pages, -1)
        shape = [int(extent) for extent in kv.pool_shape(entry)[1:]]
        begin = argument.column_offset
        return rows[:, begin : begin + math.prod(shape)].reshape(num_pages, *shape)


def as_tensor(data: Array, dtype: str, shape: tuple[int, ...]) -> Array:
    """Bytes as elements of a type; two of 4 bits a byte, the first in the lower half."""
    if DTYPES[dtype].bits != 4:
        return data.view(NUMPY_DTYPES[dtype]).reshape(shape)
    codes = np.stack([data & 15, data >> 4], axis=-1).reshape(shape)
    if dtype == "f4e2m1":
        return codes.view(NUMPY_DTYPES[dtype])
    nibbles = codes.astype(np.int8)
    values = np.where(nibbles > 7, nibbles - 16, nibbles) if dtype == "i4" else nibbles
    return values.astype(NUMPY_DTYPES[dtype])


def step_input(batch: StepBatch, argument: Argument, num_groups: int) -> Array:
    """What a call is given of a step: its own group's part of what each group has."""
    values = np.asarray(getattr(batch, argument.name))
    is_own = any(one.per_group for one in STEP_INPUTS if one.name == argument.name)
    return np.split(values, num_groups)[argument.index] if is_own else values


def send_step(executor: CudaExecutor, batch: StepBatch) -> Bucket:
    """Put a step's inputs where kernels find them; the bucket that the step is of."""
    bucket = executor.bucket_of(batch)
    block = np.zeros(executor.layout.num_elements, np.int32)
    end = fill_step(block, executor.layout, batch, bucket.sequences)
    place = Place(executor.program.spaces["step"], 0)
    executor.program.device.send(block[:end].view(np.uint8), place)
    return bucket


def random_values(random: np.random.Generator, dtype: str, count: int) -> Array:
    """Values of ordinary size in every type."""
    if dtype == "i8":
        return random.integers(-100, 101, count).astype(np.int8)
    values = random.standard_normal(count, np.float32)
    if dtype == "f8e4m3":
        return (values * 16).astype(ml_dtypes.float8_e4m3fn)
    return values.astype(NUMPY_DTYPES[dtype])


def ragged_batch(
    executor: CudaExecutor, sequences: tuple[tuple[int, int], ...], random: np.random.Generator
) -> StepBatch:
    """Scattered pages, random tokens, logits of each sequence's last token."""
    size = executor.kv.page_size
    free = list(random.permutation(executor.num_pages))
    widths = [-(-context // size) for context, _ in sequences]
    tables = np.zeros((executor.layout.num_groups, len(sequences), max(widths)), np.int32)
    for table in tables:
        for row, width in enumerate(widths):
            table[row, :width] = [free.pop() for _ in range(width)]
    positions = np.concatenate([np.arange(end - new, end) for end, new in sequences])
    owners = np.repeat(np.arange(len(sequences)), [new for _, new in sequences])
    ends = np.cumsum([new for _, new in sequences])
    return StepBatch(
        token_ids=random.integers(0, executor.vocab_size, len(positions)).astype(np.int32),
        positions=positions.astype(np.int32),
        slots=(tables[:, owners, positions // size] * size + positions % size)
        .reshape(-1)
        .astype(np.int32),
        query_start=np.concatenate([[0], ends]).astype(np.int32),
        context_lens=np.array([context for context, _ in sequences], np.int32),
        page_table=tables.reshape(-1, max(widths)),
        logit_rows=(ends - 1).astype(np.int32),
    )

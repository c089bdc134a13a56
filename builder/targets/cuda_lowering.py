"""Static plan -> launch plan: every call's kernels compiled once, every address resolved."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import msgspec

from trtc.builder.memory import align
from trtc.builder.targets.cuda_concurrency import overlap_calls
from trtc.builder.targets.cuda_step import Numbered, grid_axes, plan_sampling, step_block
from trtc.builder.targets.gpu.nvrtc import compile_cuda
from trtc.builder.targets.gpu.ptx import CompiledKernel
from trtc.builder.targets.gpu.triton import compile_kernels_in
from trtc.builder.targets.gpu.triton_process import TritonProcess
from trtc.plugins.attention import split_kv
from trtc.plugins.gpu.lowering import (
    DIMS,
    NEXT_WEIGHT,
    SCRATCH,
    Collective,
    Gemm,
    Launch,
    Lower,
    Site,
    Variant,
)
from trtc.plugins.gpu.sources import CudaSource, KernelSource
from trtc.plugins.registry import REGISTRY
from trtc.protos.dtypes import DTYPES
from trtc.protos.errors import InvariantError
from trtc.protos.launch_plan import (
    KERNELS_DIR,
    Address,
    CallLaunches,
    CallVariant,
    CollectiveCall,
    KernelCall,
    KernelCode,
    LaunchPlan,
    Matrix,
    ProductCall,
    TileMap,
)
from trtc.protos.launch_plan import Work as LaunchedWork
from trtc.protos.plan import Argument, Call, Plan
from trtc.protos.progress import Progress, Step
from trtc.protos.step import group_input

Source = KernelSource | CudaSource
_ALIGNMENT = 16
"""Bytes. Kernels load rows and views in pieces of this size."""


@dataclass(frozen=True)
class LoweredCall:
    """A call with all the ways to run it."""

    call: Call
    site: Site
    variants: tuple[Variant, ...]
    next_weight: Argument | None


def write_launches(
    plan: Plan,
    sm: int,
    lowerings: Mapping[str, Lower],
    engine: Path,
    progress: Progress,
    *,
    is_uniform: Callable[[str], bool],
) -> LaunchPlan:
    """Lower every call and compile its kernels into `engine`/kernels.

    Args:
        is_uniform: whether a vector of weight scales, by name, holds one value only.

    Raises:
        UnsupportedError: the SM lacks what a kernel needs.
        InvariantError: a kernel does not compile.
    """
    lowered = lower_calls(plan, sm, lowerings)
    kernels = _KernelTable(sm)
    block = step_block(plan)
    sampling = plan_sampling(plan, sm, block, kernels.add)
    works = [
        tuple(
            tuple(kernels.add(one) if isinstance(one, Launch) else one for one in variant.work)
            for variant in one.variants
        )
        for one in lowered
    ]
    codes = kernels.write(engine, progress)
    resolver = _Resolver(plan, is_uniform)
    return LaunchPlan(
        sm=sm,
        split_keys=split_kv.CUDA.keys,
        max_splits=split_kv.CUDA.max_splits,
        kernels=codes,
        calls=tuple(resolver.call(one, work) for one, work in zip(lowered, works, strict=True)),
        sampling=sampling,
        step=block,
        arena_bytes=plan.arena_bytes,
        scratch_bytes=resolver.scratch_bytes,
    )


def lower_calls(plan: Plan, sm: int, lowerings: Mapping[str, Lower]) -> list[LoweredCall]:
    """Lower every call, those that can to run beside the one before them.

    Raises:
        UnsupportedError: the SM lacks what a kernel needs.
        InvariantError: an operator has no kernels, or none for every step.
    """
    next_weights = [*(_tiled_weight(call) for call in plan.calls[1:]), None]
    lowered = [
        _lower(call, plan, sm, lowerings, next_weight)
        for call, next_weight in zip(plan.calls, next_weights, strict=True)
    ]
    overlapped = overlap_calls(plan, REGISTRY, [one.variants for one in lowered])
    return [
        replace(one, variants=variants) for one, variants in zip(lowered, overlapped, strict=True)
    ]


def _tiled_weight(call: Call) -> Argument | None:
    """The weight of a call that is one product with 4-bit weights."""
    return next(
        (one for one in call.arguments if one.parameter == "weight" and one.dtype in ("i4", "u4")),
        None,
    )


def _lower(
    call: Call,
    plan: Plan,
    sm: int,
    lowerings: Mapping[str, Lower],
    next_weight: Argument | None,
) -> LoweredCall:
    lower = lowerings.get(call.operator)
    if lower is None:
        raise InvariantError(f"no CUDA kernels for {call.operator}", field=call.site)
    site = Site(
        dtypes={argument.parameter: argument.dtype for argument in call.arguments},
        strides={argument.parameter: argument.row_stride for argument in call.arguments},
        axes={
            name: extent
            for name, extent in (call.attributes | call.axes).items()
            if isinstance(extent, int)
        },
        attributes=call.attributes,
        rows=_rows(call),
        page_size=plan.kv.page_size,
        num_groups=max(1, len(plan.kv.groups)),
        limits=plan.limits,
        sm=sm,
        next_weight_bytes=0 if next_weight is None else _weight_bytes(plan, next_weight),
    )
    variants = lower(site)
    if not variants or variants[-1].kind != "any":
        raise InvariantError("no variant fits every step", field=call.site)
    return LoweredCall(call, site, variants, next_weight)


def _weight_bytes(plan: Plan, argument: Argument) -> int:
    return next(weight.bytes for weight in plan.weights if weight.name == argument.name)


def _rows(call: Call) -> Literal["tokens", "rows"]:
    """What a call's bucket is: `gather_rows` and all that follow it work on logit rows."""
    return "rows" if "R" in (call.axes.get("M"), call.axes.get("R")) else "tokens"


_Work = Numbered | Gemm | Collective


_COMPILERS = 2
"""At a time."""


class _KernelTable:
    """Every specialisation once, in order of first use."""

    def __init__(self, sm: int) -> None:
        self._sm = sm
        self._sources: list[Source] = []
        self._numbers: dict[str, int] = {}

    def add(self, launch: Launch) -> Numbered:
        key = source_key(launch.kernel)
        if key not in self._numbers:
            self._numbers[key] = len(self._sources)
            self._sources.append(launch.kernel)
        return Numbered(self._numbers[key], launch)

    def write(self, engine: Path, progress: Progress) -> tuple[KernelCode, ...]:
        """Compile and store; compilers run in processes of their own, two at a time."""

        def compile_next(source: Source) -> CompiledKernel:
            triton = idle.get()
            try:
                return compile_source(source, self._sm, triton)
            finally:
                idle.put(triton)

        (engine / KERNELS_DIR).mkdir()
        total = len(self._sources)
        codes = []
        with ExitStack() as stack:
            idle: SimpleQueue[TritonProcess] = SimpleQueue()
            for _ in range(_COMPILERS):
                idle.put(stack.enter_context(TritonProcess()))
            pool = ThreadPoolExecutor(_COMPILERS)
            # An error or a signal waits for the kernels under way, not for all.
            stack.callback(pool.shutdown, cancel_futures=True)
            compiled = pool.map(compile_next, self._sources)
            for number, kernel in enumerate(compiled):
                progress(Step("compiling kernels", number + 1, total, "kernels"))
                file = f"{KERNELS_DIR}/{number:03}-{kernel.entry}.cubin"
                (engine / file).write_bytes(kernel.cubin)
                codes.append(
                    KernelCode(
                        file=file,
                        entry=kernel.entry,
                        num_threads=kernel.num_threads,
                        shared_bytes=kernel.shared_bytes,
                    )
                )
        return tuple(codes)


def compile_source(source: Source, sm: int, triton: TritonProcess) -> CompiledKernel:
    if isinstance(source, CudaSource):
        return compile_cuda(source, sm)
    (kernel,) = compile_kernels_in(triton, (source,), sm)
    return kernel


def source_key(source: Source) -> str:
    """Equal for sources that compile to the same code."""
    facts: list[object]
    if isinstance(source, CudaSource):
        facts = [source.file, source.entry, dict(source.constants)]
    else:
        function = source.function.fn
        facts = [function.__module__, function.__name__, dict(source.constants)]
    facts += [[(p.name, p.dtype, p.is_pointer) for p in source.parameters]]
    options = {
        name: value
        for name, value in vars(source).items()
        if name not in ("function", "parameters", "constants")
    }
    return hashlib.sha256(json.dumps([facts, options], sort_keys=True).encode()).hexdigest()


class _Resolver:
    """Names of a call's tensors -> addresses; and the scratch of the call that needs most."""

    def __init__(self, plan: Plan, is_uniform: Callable[[str], bool]) -> None:
        self._is_uniform = is_uniform
        self._offsets = {buffer.name: buffer.offset for buffer in plan.buffers}
        self._weights = {weight.name: weight.offset for weight in plan.weights}
        self.scratch_bytes = 0

    def call(self, one: LoweredCall, works: Sequence[Sequence[_Work]]) -> CallLaunches:
        return CallLaunches(
            site=one.call.site,
            rows=one.site.rows,
            variants=tuple(
                CallVariant(
                    kind=variant.kind,
                    max_rows=variant.max_rows,
                    work=self._work(one, variant, work),
                )
                for variant, work in zip(one.variants, works, strict=True)
            ),
        )

    def _work(
        self, one: LoweredCall, variant: Variant, work: Sequence[_Work]
    ) -> tuple[LaunchedWork, ...]:
        names = {argument.parameter: self._address(argument) for argument in one.call.arguments}
        names[DIMS] = Address(space="step", name=DIMS)
        if one.next_weight is not None:
            names[NEXT_WEIGHT] = self._address(one.next_weight)
        end = 0
        for name, num_bytes in variant.scratch.items():
            names[SCRATCH + name] = Address(space="scratch", offset=end)
            end = align(end + num_bytes)
        for name, (buffer, skipped) in variant.views.items():
            begin = names[SCRATCH + buffer]
            names[SCRATCH + name] = msgspec.structs.replace(begin, offset=begin.offset + skipped)
        self.scratch_bytes = max(self.scratch_bytes, end)
        return tuple(self._part(one, part, names) for part in work)

    def _part(self, one: LoweredCall, part: _Work, names: Mapping[str, Address]) -> LaunchedWork:
        match part:
            case Numbered():
                return self._kernel(one, part, names)
            case Gemm():
                return self._product(one, part, names)
            case Collective():
                return self._collective(one, part, names)

    def _kernel(self, one: LoweredCall, part: Numbered, names: Mapping[str, Address]) -> KernelCall:
        launch = part.launch
        if len(launch.arguments) + len(launch.maps) != len(launch.kernel.parameters):
            raise InvariantError("a launch has too few or too many arguments", field=one.call.site)
        return KernelCall(
            kernel=part.kernel,
            arguments=tuple(names[name] for name in launch.arguments),
            grid=grid_axes(launch.grid),
            overlaps=launch.overlaps,
            least_splits=launch.least_splits,
            maps=tuple(
                TileMap(names[one.parameter], one.sizes, one.strides, one.box)
                for one in launch.maps
            ),
        )

    def _product(
        self, one: LoweredCall, product: Gemm, names: Mapping[str, Address]
    ) -> ProductCall:
        site = one.site
        if product.row_scale and site.strides[product.row_scale] != 1:
            raise InvariantError("scales of rows have gaps between them", field=one.call.site)
        num_columns, depth = site.axes["N"], site.axes["K"]

        def matrix(parameter: str, columns: int, rows: int = 0) -> Matrix:
            return Matrix(
                address=names[parameter],
                dtype=site.dtypes.get(parameter, "bf16"),
                columns=columns,
                stride=site.strides.get(parameter, columns),
                rows=rows,
            )

        return ProductCall(
            x=matrix(product.x, depth),
            weight=matrix(product.weight, depth, num_columns),
            out=matrix(product.out, num_columns),
            input_scale=names.get(product.input_scale),
            weight_scale=names.get(product.weight_scale),
            uniform_scale=any(
                argument.parameter == product.weight_scale and self._is_uniform(argument.name)
                for argument in one.call.arguments
            ),
            bias=names.get(product.bias),
            residual=matrix(product.residual, num_columns) if product.residual else None,
            row_scale=names.get(product.row_scale),
        )

    def _collective(
        self, one: LoweredCall, collective: Collective, names: Mapping[str, Address]
    ) -> CollectiveCall:
        site, columns = one.site, one.site.axes["K"]
        for parameter in (collective.source, collective.target):
            if site.strides.get(parameter, columns) != columns:
                raise InvariantError(f"{parameter} has gaps between its rows", field=one.call.site)
        return CollectiveCall(
            kind=collective.kind,
            source=names[collective.source],
            target=names[collective.target],
            dtype=site.dtypes[collective.source],
            columns=columns,
        )

    def _address(self, argument: Argument) -> Address:
        skipped = DTYPES[argument.dtype].num_bytes(argument.column_offset)
        if skipped % _ALIGNMENT:
            raise InvariantError(
                f"begins {skipped} bytes into its row, not at a multiple of {_ALIGNMENT}",
                field=argument.name,
            )
        match argument.kind:
            case "buffer":
                return Address(space="arena", offset=self._offsets[argument.name] + skipped)
            case "weight":
                return Address(space="weights", offset=self._weights[argument.name])
            case "pool":
                return Address(space="pool", index=argument.index, offset=skipped)
            case "step":
                return Address(space="step", name=group_input(argument.name, argument.index))
            case "logits":
                return Address(space="logits")

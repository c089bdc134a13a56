"""The TensorRT target: a portable bundle, which `trtc compile` turns into a plan on a GPU host.

The graph stays standard ONNX with Q/DQ, except where TensorRT requires otherwise; its
weights are external data in weights.safetensors. The plugin nodes carry the attributes by which
TensorRT's ONNX parser finds an ahead-of-time plugin.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import onnx

from trtc.builder.memory import align
from trtc.builder.module import TRTC_DOMAIN, Module
from trtc.builder.onnx_check import is_external
from trtc.builder.passes.base import Pass
from trtc.builder.passes.order import TENSORRT_PASSES
from trtc.builder.recipes import TensorReader
from trtc.builder.targets.base import Compiled, CompileRequest, refuse_dynamic
from trtc.builder.targets.gpu.triton import TRITON_VERSION, check_triton
from trtc.builder.targets.tensorrt.compile import compiles_here, make_plan
from trtc.builder.targets.tensorrt.kernels import write_kernels
from trtc.builder.targets.tensorrt.stages import whole_stages
from trtc.builder.weights_file import with_external_weights, write_weights
from trtc.plugins.gpu.arch import ARCHS, sm_of_target
from trtc.protos.bundle import (
    MAX_ELEMENTS,
    PLAN_BLOB_FILE,
    RECIPE_FILE,
    TIMING_CACHE_FILE,
    Profile,
    Recipe,
    max_pool_pages,
)
from trtc.protos.dtypes import BY_ONNX
from trtc.protos.errors import UnsupportedError
from trtc.protos.kv import CacheLayout
from trtc.protos.manifest import (
    GRAPH_FILE,
    WEIGHTS_FILE,
    ByteLedger,
    Limits,
    TargetFacts,
)
from trtc.protos.plan import Fill, Weight
from trtc.protos.progress import Progress, Step
from trtc.protos.record import record_json
from trtc.protos.stages import STAGES_FILE
from trtc.quant.scheme import MIXED, Scheme

_OURS = {"iq4": "iq4", "i6": "6-bit"}
"""What is said of weights that TensorRT has not."""
PLUGIN_ATTRIBUTES: Mapping[str, str | int] = {
    "plugin_namespace": TRTC_DOMAIN,
    "plugin_version": "1",
    "aot": 1,
}
"""What TensorRT's parser reads of a plugin node, besides the operator's own attributes."""


@dataclass(frozen=True)
class TensorRtTarget:
    """`tensorrt:sm_90`."""

    sm: int

    @property
    def name(self) -> str:
        return f"tensorrt:sm_{self.sm}"

    @property
    def runs_here(self) -> bool:
        """With TensorRT and the GPU, where the bundle is compiled as well."""
        return compiles_here(self.sm)

    @property
    def window_groups(self) -> bool:
        """Layers of several groups write to one memory. Plans have an input and an output for each
        layer's pool, and TensorRT does not promise that none is copied and written back as a
        whole, over what another layer has written meanwhile."""
        return False

    @property
    def keeps_states(self) -> bool:
        return False

    @property
    def attends_to_latents(self) -> bool:
        return False

    @property
    def shares_keys(self) -> bool:
        return False

    @property
    def has_layer_inputs(self) -> bool:
        return False

    @property
    def has_sinks(self) -> bool:
        return False

    @property
    def rounds_rows(self) -> bool:
        return False

    @property
    def multiplies_fp4(self) -> bool:
        return True

    @property
    def scales_kv(self) -> bool:
        return False

    @property
    def max_ranks(self) -> int:
        return 1

    def check(self, scheme: Scheme) -> None:
        check_triton("tensorrt-build")
        self.check_scheme(scheme)

    def check_scheme(self, scheme: Scheme) -> None:
        refuse_dynamic(scheme, self.name)
        check_scheme(scheme, self.sm)

    def passes(self, request: CompileRequest) -> tuple[Pass, ...]:
        check_graph(request)
        return TENSORRT_PASSES

    def compile(self, request: CompileRequest, progress: Progress) -> Compiled:
        progress(Step(f"compiling kernels for sm_{self.sm}"))
        kernels = write_kernels(request.module, self.sm, request.workdir)
        num_bytes = write_graph(request.module, request.reader, request.workdir, progress)
        kv = request.module.kv
        profiles = make_profiles(request.limits, kv)
        recipe = Recipe(sm=self.sm, pool=kv, profiles=profiles, kernels=kernels)
        (request.workdir / RECIPE_FILE).write_bytes(record_json(recipe))
        stages = whole_stages(request.module, profiles)
        (request.workdir / STAGES_FILE).write_bytes(record_json(stages))
        versions = sorted({kernel.ptx_version for kernel in kernels})
        bundle = Compiled(
            facts=TargetFacts(
                kind="tensorrt",
                name=self.name,
                archs=(f"sm_{self.sm}",),
                toolchain=f"triton {TRITON_VERSION}, PTX {', '.join(versions)}, no plan",
            ),
            kv=kv,
            ledger=ByteLedger(
                weights=num_bytes,
                activations=0,  # TensorRT decides: the plan says
                page=kv.page_bytes,
            ),
            notes=("there is no plan yet: run `trtc compile` on the directory on the GPU host",),
        )
        return self._with_plan(bundle, request, recipe, progress) if self.runs_here else bundle

    def _with_plan(
        self, bundle: Compiled, request: CompileRequest, recipe: Recipe, progress: Progress
    ) -> Compiled:
        """Build the plan as well, as `trtc compile` would."""
        made = make_plan(request.workdir, recipe, b"", progress)
        (request.workdir / PLAN_BLOB_FILE).write_bytes(made.plan)
        (request.workdir / TIMING_CACHE_FILE).write_bytes(made.timing_cache)
        ledger = msgspec.structs.replace(bundle.ledger, activations=made.activations)
        return replace(bundle, facts=made.facts(bundle.facts), ledger=ledger, notes=())


def parse_tensorrt_target(detail: str) -> TensorRtTarget:
    """The part of `--target` after `tensorrt:`.

    Raises:
        UnsupportedError: not an SM that kernels are compiled for, or none.
    """
    return TensorRtTarget(sm_of_target("tensorrt", detail))


def write_graph(module: Module, reader: TensorReader, directory: Path, progress: Progress) -> int:
    """Write graph.onnx and the weights.safetensors that it points into; bytes of the weights."""
    weights = place_weights(module)
    graph = with_plugin_attributes(with_external_weights(module.model, weights))
    (directory / GRAPH_FILE).write_bytes(graph.SerializeToString(deterministic=True))
    write_weights([directory / WEIGHTS_FILE], weights, module.recipes, reader, progress)
    return weights_bytes(weights)


def with_plugin_attributes(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose plugin nodes say how TensorRT finds them."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for node in result.graph.node:
        if node.domain == TRTC_DOMAIN:
            for name, value in PLUGIN_ATTRIBUTES.items():
                node.attribute.append(onnx.helper.make_attribute(name, value))
    return result


def make_profiles(limits: Limits, kv: CacheLayout) -> tuple[Profile, ...]:
    """One profile for steps of decodes, one for steps with prefill chunks.

    The pool's length varies too, from a page to all sequences at full length.
    """
    batch, tokens = limits.max_batch_size, limits.max_num_tokens
    width = kv.pages_for(limits.max_seq_len)
    pages = max_pool_pages(limits, kv)
    shared = {
        "B": (1, batch, batch),
        "B+1": (2, batch + 1, batch + 1),
        "P": (1, width, width),
        "R": (1, batch, batch),
        "num_pages": (1, pages, pages),
    }
    return (
        Profile(name="decode", extents={"T": (1, batch, batch), **shared}),
        Profile(name="prefill", extents={"T": (1, tokens, tokens), **shared}),
    )


def check_scheme(scheme: Scheme, sm: int) -> None:
    """Refuse FP8 and FP4 where the hardware has none, and several formats in one engine.

    Raises:
        UnsupportedError: it has none.
    """
    if scheme.name == MIXED:
        raise UnsupportedError(
            "the target takes one format for all linears",
            field="--recipe",
            remedy="Use --dtype, or --target cpu or cuda",
        )
    if scheme.weight in _OURS:
        raise UnsupportedError(
            f"TensorRT has no {_OURS[scheme.weight]} weights",
            field="--dtype",
            remedy="Use int4, or --target cpu or cuda",
        )
    if "f8e4m3" in (scheme.weight, scheme.activation) and not ARCHS[sm].has_e4m3:
        raise UnsupportedError(
            f"sm_{sm} has no E4M3 arithmetic",
            field="--dtype",
            remedy="Use bf16, int8_sq or int4, or a target from sm_89 on",
        )
    if "f4e2m1" in (scheme.weight, scheme.activation) and not ARCHS[sm].has_e2m1:
        raise UnsupportedError(
            f"sm_{sm} has no FP4 arithmetic",
            field="--dtype",
            remedy="Use fp8, or target sm_100 or sm_120",
        )


def check_graph(request: CompileRequest) -> None:
    """Refuse modules that TensorRT cannot build.

    Raises:
        UnsupportedError: dummy weights, zero points, or more experts' rows than a tensor can hold.
    """
    if request.dummy_weights:
        raise UnsupportedError(
            "a plan is built from its weights", field="--dummy-weights", remedy="Leave it out"
        )
    _check_experts(request.module)
    graph = request.module.model.graph
    for tensor in graph.initializer:
        if tensor.data_type == onnx.TensorProto.UINT4:
            raise UnsupportedError(
                "has zero points, and TensorRT quantises symmetrically only",
                field=tensor.name,
                remedy="Quantise with --dtype int4, or use --target cpu",
            )


def _check_experts(module: Module) -> None:
    """Every expert takes every row of a step, so the rows of all are one tensor."""
    num_tokens = module.limits.max_num_tokens
    shapes = {tensor.name: tuple(tensor.dims) for tensor in module.model.graph.initializer}
    for node in module.model.graph.node:
        if node.domain == TRTC_DOMAIN and node.op_type == "moe":
            num_experts, gate_and_up, hidden = shapes[node.input[2]]
            most = MAX_ELEMENTS // (num_experts * max(gate_and_up, hidden))
            if num_tokens > most:
                raise UnsupportedError(
                    f"is {num_tokens}, and {num_experts} experts of that many rows are more than "
                    f"the {MAX_ELEMENTS} elements of TensorRT's largest tensor",
                    field="--max-num-tokens",
                    remedy=f"Use at most {most} for this model, or --target cuda:sm_90",
                )


def place_weights(module: Module) -> tuple[Weight, ...]:
    """Every large initialiser in the order of the graph, one after another."""
    weights: list[Weight] = []
    for tensor in module.model.graph.initializer:
        if not is_external(tensor):
            continue
        dtype = BY_ONNX[tensor.data_type]
        shape = tuple(tensor.dims)
        weights.append(
            Weight(
                name=tensor.name,
                dtype=dtype.name,
                shape=shape,
                layout="row_major",
                offset=weights_bytes(weights),
                bytes=dtype.num_bytes(math.prod(shape)),
                fill=Fill(element=dtype.name),
            )
        )
    return tuple(weights)


def weights_bytes(weights: Sequence[Weight]) -> int:
    """Length of the data section that holds them."""
    return align(weights[-1].offset + weights[-1].bytes) if weights else 0

"""Which targets a checkpoint can be built for, and the engine's size; reads no weights."""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trtc.builder.checkpoint.checkpoint import CONFIG_FILE
from trtc.builder.checkpoint.dummy import dummy_checkpoint
from trtc.builder.checkpoint.resolve import resolve_model
from trtc.builder.checkpoint.verify import expected_tensors
from trtc.builder.engine_size import engine_bytes
from trtc.builder.experts import check_activations
from trtc.builder.families.features import features
from trtc.builder.graph import GraphRequest, build_graph
from trtc.builder.mixers import check_kv, check_mixers
from trtc.builder.module import Module
from trtc.builder.recipe_budget import narrowest_recipe
from trtc.builder.request import BuildRequest
from trtc.builder.sharding import check_sharding
from trtc.builder.source import ModelSource, open_source
from trtc.builder.spec import MoeMlpSpec
from trtc.builder.tables import open_tables
from trtc.builder.targets.registry import parse_target
from trtc.protos.dtypes import BY_ONNX
from trtc.protos.errors import RequestError, UserError
from trtc.protos.manifest import Limits
from trtc.quant.recipe import MIXED_SCHEME

ALL_TARGETS = ("cpu", "cuda:sm_90", "tensorrt:sm_90", "tensorrt-rtx:sm_120")
"""One of each kind, asked where no target is named."""
GPU_GIGABYTES = (24, 48, 80, 141)
"""Memory of an RTX 4090, an L40S, an H100 and an H200."""
_RESERVE = 0.1
"""Of a GPU's memory: activations, kernels and the driver."""


@dataclass(frozen=True)
class Verdict:
    """The outcome for one target."""

    target: str
    reason: str = ""
    """Why the target is refused; "": it is not."""


@dataclass(frozen=True)
class DryRun:
    """What a build would make. All sizes are bytes."""

    model: str
    architecture: str
    family: str
    features: tuple[str, ...]
    """What it is made of beside what Llama has."""
    num_parameters: int
    num_layers: int
    scheme: str
    kv_dtype: str
    max_seq_len: int
    weights: int
    """As the source graph has them; targets pack some of them closer."""
    kv_of_token: int
    """Of a token in the KV pool, in layers that keep every token."""
    kv_of_sequence: int
    """Of one sequence of `max_seq_len` tokens, where pages that a window has left are released."""
    tokens_beside_weights: dict[int, int]
    """Gigabytes of a GPU's memory -> tokens of KV pool that it has room for, on `tp` such GPUs; 0:
    the weights alone do not fit."""
    verdicts: tuple[Verdict, ...]
    unknown_tensors: tuple[str, ...]
    """In the checkpoint, but not of the model: a build leaves them out."""
    least_weights: int | None
    """Of the smallest engine that a search may find, where one is asked for."""
    checked_tensors: bool
    """Whether there were weights, whose names and shapes fit; otherwise config.json alone was
    read."""

    @property
    def builds(self) -> bool:
        """For one target at least."""
        return any(not verdict.reason for verdict in self.verdicts)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "builds": self.builds}, indent=2)


def dry_run(request: BuildRequest) -> DryRun:
    """Everything that a build would refuse before its work, and the sizes of what it would make.

    `request.model` may also be the path of a config.json. Where there are no weights, or
    `dummy_weights` is set, config.json alone decides.

    Raises:
        UserError: no target could build it: the config, the tensors or an option is at fault.
    """
    request.check()
    if request.recipe is not None:
        raise RequestError(
            "is not read by a dry run", field="--recipe", remedy="Give a --dtype near to it"
        )
    directory = _directory(request)
    has_weights = any(directory.glob("*.safetensors")) and not request.dummy_weights
    source = open_source(
        replace(request, model=str(directory), revision=None, dummy_weights=not has_weights)
    )
    limits = Limits(
        max_batch_size=request.max_batch_size,
        max_seq_len=source.max_seq_len,
        max_num_tokens=request.max_num_tokens,
        rope_switch=source.spec.rope_switch,
    )
    # Weights alone have the size; there is no graph of experts with FP4 activations.
    sized = source.for_target(rounds_rows=True, multiplies_fp4=False)
    spec, quantization, reader = sized.spec, sized.quantization, sized.reader
    if source.needs_calibration:
        # What calibration will make: a dry run leaves it out.
        spec = source.calibrated_spec
        reader, quantization = dummy_checkpoint(spec, source.scheme)
    graph_request = GraphRequest(
        sized.scheme,
        source.kv_dtype,
        limits,
        quantization,
        request.page_size,
        window_groups=True,
    )
    module = build_graph(spec, graph_request, reader)
    targets = ALL_TARGETS if request.target is None else (request.target,)
    verdicts = tuple(_verdict(request, source, target) for target in targets)
    least = None
    if request.has_size:
        sizes = {one.target: _least_bytes(request, source, one) for one in verdicts}
        verdicts = tuple(_within(one, sizes[one.target], request.max_bytes) for one in verdicts)
        least = min((size for size in sizes.values() if size is not None), default=None)
    return _described(request, source, module, verdicts, has_weights, least)


def _directory(request: BuildRequest) -> Path:
    path = Path(request.model).expanduser()
    if path.is_file() and path.name == CONFIG_FILE:
        return path.parent
    local = path.is_dir()
    return resolve_model(request.model, request.revision, weights=local)


def _verdict(request: BuildRequest, source: ModelSource, name: str) -> Verdict:
    try:
        target = parse_target(name)
        source = source.for_target(
            rounds_rows=target.rounds_rows, multiplies_fp4=target.multiplies_fp4
        )
        check_mixers(source.spec, target)
        check_kv(source.spec, source.kv_dtype, target)
        for scheme in source.schemes:
            target.check_scheme(scheme)
        if request.has_size:
            target.check_scheme(MIXED_SCHEME)
            source = replace(source, scheme=MIXED_SCHEME)
        _check_experts(source)
        ranks = request.tp if target.max_ranks > 1 else 1
        check_sharding(source.spec, source.scheme, source.quantization, ranks, ep=request.ep)
    except UserError as error:
        return Verdict(name, str(error))
    if request.tp > target.max_ranks:
        return Verdict(name, f"--tp: is {request.tp}, and it takes at most {target.max_ranks}")
    return Verdict(name)


def _check_experts(source: ModelSource) -> None:
    for layer in source.spec.layers:
        if isinstance(layer.mlp, MoeMlpSpec) and source.quantization is not None:
            check_activations(layer.mlp, source.quantization.linears)


def _least_bytes(request: BuildRequest, source: ModelSource, verdict: Verdict) -> int | None:
    """Of an engine with the narrowest recipe; None: the target builds none."""
    if verdict.reason:
        return None
    recipe = narrowest_recipe(source.checkpoint.path, open_tables(source.spec, source.tables))
    return engine_bytes(request, source, parse_target(verdict.target))(recipe)


def _within(verdict: Verdict, least: int | None, max_bytes: int | None) -> Verdict:
    if least is None or max_bytes is None or least <= max_bytes:
        return verdict
    reason = f"--max-bytes: the weights of the smallest engine take {least:,} bytes"
    return Verdict(verdict.target, reason)


def _described(
    request: BuildRequest,
    source: ModelSource,
    module: Module,
    verdicts: tuple[Verdict, ...],
    has_weights: bool,
    least_weights: int | None,
) -> DryRun:
    spec, kv = source.spec, module.kv
    weights = _weights_bytes(module)
    of_token = sum(
        entry.num_bytes for group in kv.groups if not group.is_state for entry in group.entries
    )
    of_sequence = kv.pages_of_sequence(source.max_seq_len) * kv.page_bytes
    room = {
        gigabytes: _tokens(gigabytes * request.tp, weights, of_token) for gigabytes in GPU_GIGABYTES
    }
    return DryRun(
        model=source.checkpoint.name,
        architecture=spec.architecture,
        family=spec.family,
        features=features(spec),
        num_parameters=sum(math.prod(shape) for shape in expected_tensors(spec).values()),
        num_layers=len(spec.layers),
        scheme=source.scheme.name,
        kv_dtype=source.kv_dtype,
        max_seq_len=source.max_seq_len,
        weights=weights,
        kv_of_token=of_token,
        kv_of_sequence=of_sequence,
        tokens_beside_weights=room,
        verdicts=verdicts,
        unknown_tensors=source.unknown_tensors,
        least_weights=least_weights,
        checked_tensors=has_weights,
    )


def _tokens(gigabytes: int, weights: int, of_token: int) -> int:
    room = int(gigabytes * 10**9 * (1 - _RESERVE)) - weights
    return max(0, room // of_token) if of_token else 0


def _weights_bytes(module: Module) -> int:
    total = 0
    for tensor in module.model.graph.initializer:
        dtype = BY_ONNX.get(tensor.data_type)
        if dtype is not None:
            total += dtype.num_bytes(math.prod(tensor.dims))
    return total

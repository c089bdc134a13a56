"""What an engine's weights take, from its plan alone: no weight is read."""

from collections.abc import Callable, Mapping
from pathlib import Path

from trtc.builder.checkpoint.dummy import dummy_checkpoint
from trtc.builder.graph import GraphRequest, build_graph
from trtc.builder.passes.base import run_passes
from trtc.builder.plan import make_plan
from trtc.builder.request import BuildRequest
from trtc.builder.source import ModelSource
from trtc.builder.targets.base import CompileRequest, Target
from trtc.plugins.registry import REGISTRY
from trtc.protos.manifest import Limits
from trtc.quant.plain_names import plain_name
from trtc.quant.recipe import FormatRecipe
from trtc.quant.scheme import MIXED, Scheme
from trtc.quant.site_format import SiteFormat, site_of

Bytes = Callable[[FormatRecipe], int]
"""Of an engine's weights with a recipe."""


def engine_bytes(request: BuildRequest, source: ModelSource, target: Target) -> Bytes:
    """What engines of a model take, of one rank, by recipe; what a recipe leaves open is as the
    request says."""

    def measured(recipe: FormatRecipe) -> int:
        by_site = {plain_name(site): one for site, one in recipe.formats.items()}
        built, spec = source.following(recipe), source.calibrated_spec

        def scheme_of(linear: str) -> Scheme:
            return _scheme(_format_of(linear, by_site))

        reader, quantization = dummy_checkpoint(spec, built.scheme, scheme_of)
        limits = Limits(
            max_batch_size=request.max_batch_size,
            max_seq_len=source.max_seq_len,
            max_num_tokens=request.max_num_tokens,
            rope_switch=spec.rope_switch,
        )
        graph_request = GraphRequest(
            built.scheme,
            source.kv_dtype,
            limits,
            quantization,
            request.page_size,
            window_groups=target.window_groups,
        )
        draft = CompileRequest(
            module=build_graph(spec, graph_request, reader),
            reader=reader,
            scheme=built.scheme,
            limits=limits,
            exact_activations=request.exact_activations,
            tables=built.tables,
            exact_weights=request.exact_weights,
            dummy_weights=True,
            workdir=Path(),
            scratch=Path(),
            ranks=request.tp,
            ep=request.ep,
        )
        module, _ = run_passes(draft.module, target.passes(draft))
        return make_plan(module, REGISTRY).weights_bytes

    return measured


def _format_of(linear: str, by_site: Mapping[str, SiteFormat]) -> SiteFormat:
    return by_site[site_of(plain_name(linear))]


def _scheme(one: SiteFormat) -> Scheme:
    return Scheme(MIXED, "bf16", one.weight, "bf16", one.group_size)

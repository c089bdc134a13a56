"""Builds a plan from a graph, by TensorRT or TensorRT for RTX."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtc.plugins.tensorrt.library import make_logger
from trtc.protos.bundle import Profile
from trtc.protos.errors import EnvironmentFault, UnsupportedError
from trtc.protos.progress import Progress, Step


@dataclass(frozen=True)
class PlanOptions:
    """Options of a plan, besides its graph."""

    profiles: tuple[Profile, ...]
    optimization_level: int
    workspace_bytes: int
    timing_cache: bytes | None = None
    """None: kept and reused nowhere (TensorRT for RTX has no such cache)."""
    alias_pools: bool = False
    strip: bool = False
    """Leave the weights out: they will be refitted, unchanged."""
    configure: Callable[[Any], None] = field(default=lambda config: None)
    """Called last on the IBuilderConfig."""


@dataclass(frozen=True)
class BuiltPlan:
    plan: bytes
    timing_cache: bytes | None
    warnings: tuple[str, ...]


def build_plan(trt: Any, graph: Path, options: PlanOptions, progress: Progress) -> BuiltPlan:
    """Parse `graph` (its weights are external files beside it) and build it.

    Raises:
        EnvironmentFault: the library is there and its builder is not.
        UnsupportedError: it refuses the graph; the message names the node.
    """
    log = make_logger(trt)
    builder = _builder(trt, log)
    network = builder.create_network(_network_flags(trt))
    parser = trt.OnnxParser(network, log)
    progress(Step("parsing the graph"))
    if not parser.parse_from_file(str(graph)):
        raise _refusal(parser, log)
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    config.builder_optimization_level = options.optimization_level
    config.progress_monitor = _monitor(trt, progress)
    if options.alias_pools:
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    if options.strip:
        config.set_flag(trt.BuilderFlag.STRIP_PLAN)
    for one in options.profiles:
        config.add_optimization_profile(_profile(builder, network, one.extents))
    if options.timing_cache is not None:
        config.set_timing_cache(config.create_timing_cache(options.timing_cache), False)
    options.configure(config)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise UnsupportedError(
            f"TensorRT could not build the graph: {log.last_error}", field=str(graph)
        )
    cache = None
    if options.timing_cache is not None:
        cache = bytes(memoryview(config.get_timing_cache().serialize()))
    return BuiltPlan(bytes(memoryview(plan)), cache, tuple(log.warnings))


def _builder(trt: Any, log: Any) -> Any:
    try:
        return trt.Builder(log)
    except TypeError as error:  # what its factory says when the library or the driver is not there
        raise EnvironmentFault(
            f"its builder does not start ({error})",
            field=str(trt.__name__),
            remedy="Install the complete library and an NVIDIA driver; see `trtc doctor`",
        ) from error


def _network_flags(trt: Any) -> int:
    """Strong typing is TensorRT 11's only mode; plugins in their ahead-of-time form."""
    flags = trt.NetworkDefinitionCreationFlag
    wanted = getattr(flags, "PREFER_AOT_PYTHON_PLUGINS", None)
    return 0 if wanted is None else 1 << int(wanted)


def _refusal(parser: Any, log: Any) -> UnsupportedError:
    if not parser.num_errors:
        return UnsupportedError(f"TensorRT does not parse the graph: {log.last_error}")
    error = parser.get_error(0)
    return UnsupportedError(
        f"TensorRT refuses it: {error.desc()}", field=error.node_name() or error.node_operator()
    )


def _profile(builder: Any, network: Any, extents: Mapping[str, tuple[int, int, int]]) -> Any:
    """Every varying axis of every input carries its symbol as its name."""
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        axes = [
            extents[tensor.get_dimension_name(axis)] if extent < 0 else (extent,) * 3
            for axis, extent in enumerate(tensor.shape)
        ]
        profile.set_shape(tensor.name, *zip(*axes, strict=True))
    return profile


def _monitor(trt: Any, progress: Progress) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """TensorRT's nested phases as lines: `Building Engine from Subgraph 3/12`."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.totals: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.totals[phase_name] = num_steps
            progress(Step(phase_name))

        def step_complete(self, phase_name: str, step: int) -> bool:
            progress(Step(phase_name, step + 1, self.totals[phase_name], "steps"))
            return True

        def phase_finish(self, phase_name: str) -> None:
            del self.totals[phase_name]

    return Monitor()

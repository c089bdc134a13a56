"""Refits the weights of a stripped plan from the graph that it was built from."""

from pathlib import Path
from typing import Any

from trtc.protos.errors import EngineIncompatibleError


def refit_engine(trt: Any, log: Any, engine: Any, graph: Path) -> None:
    """Refit all weights of `engine` from `graph` and the external data beside it.

    Args:
        log: the logger of make_logger.
        engine: a refittable ICudaEngine: its plan was built with STRIP_PLAN.

    Raises:
        EngineIncompatibleError: the graph does not give every weight, or the library refuses.
    """
    refitter = trt.Refitter(engine, log)
    parser = trt.OnnxParserRefitter(refitter, log)
    if not parser.refit_from_file(str(graph)):
        if parser.num_errors:
            error = parser.get_error(0)
            where = error.node_name() or error.node_operator()
            raise _refusal(graph, f"{where}: {error.desc()}")
        raise _refusal(graph, log.last_error)
    missing = list(refitter.get_missing_weights())
    if missing:
        raise _refusal(graph, f"it lacks {len(missing)} weights, {missing[0]} first")
    if not refitter.refit_cuda_engine():
        raise _refusal(graph, log.last_error)


def _refusal(graph: Path, reason: str) -> EngineIncompatibleError:
    return EngineIncompatibleError(
        f"the plan's weights cannot be refitted from it: {reason}",
        field=str(graph),
        remedy="Run `trtc compile` again, with --no-strip if it helps nothing",
    )

"""`trtc.build` and `trtc.open_engine`: the command line's work, from Python."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from trtc.runtime.engine import LocalEngine

if TYPE_CHECKING:
    from trtc.builder.pipeline import BuildResult


class BuildOptions(TypedDict, total=False):
    """The options of `trtc build`, with the defaults of BuildRequest, where each is described."""

    dtype: str | None
    kv_dtype: str | None
    target: str | None
    force: bool
    calib: Path | None
    max_kl: float | None
    exact_activations: bool
    exact_lm_head: bool
    dummy_weights: bool
    max_batch_size: int
    max_seq_len: int | None
    max_num_tokens: int
    page_size: int
    reference: str | None
    tp: int


def build(
    model: str | Path,
    output: str | Path,
    *,
    progress: Callable[[str], None] = lambda message: None,
    num_threads: int | None = None,
    **options: Unpack[BuildOptions],
) -> "BuildResult":
    """Compile a checkpoint into an engine directory and measure it.

    Args:
        model: a checkpoint directory, or a name on the Hugging Face hub.
        output: where the engine goes; it appears whole or not at all.
        progress: called with what is being done now.
        num_threads: CPU threads that measure the engine; None: the usable cores.

    Raises:
        UserError: an option, the checkpoint or the output is at fault.
        EnvironmentFault: this machine lacks something, such as a C++ compiler.
    """
    from trtc.builder.pipeline import build as build_engine
    from trtc.builder.request import BuildRequest
    from trtc.runtime.probe import Probe

    request = BuildRequest(model=str(model), output=Path(output), **options)
    return build_engine(request, probe=Probe(num_threads), progress=progress)


def open_engine(
    engine: str | Path,
    *,
    num_threads: int | None = None,
    kv_bytes: int | None = None,
    dummy_weights: bool = False,
) -> LocalEngine:
    """Open an engine in this process.

    Args:
        engine: directory written by `build`.
        num_threads: CPU threads; None: the usable cores.
        kv_bytes: memory of the KV pool; None: enough for a full batch, if there is room.
        dummy_weights: fill in random weights, for an engine that was built without any.

    Raises:
        EngineError: the directory is damaged, or not for this machine.
        EnvironmentFault: too little memory, or the code does not load.
    """
    return LocalEngine.open(
        engine, num_threads=num_threads, kv_bytes=kv_bytes, dummy_weights=dummy_weights
    )

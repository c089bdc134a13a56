"""The target contract: how a module becomes files that a device runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trtc.builder.module import Module
from trtc.builder.passes.base import Pass
from trtc.builder.recipes import TensorReader
from trtc.protos.errors import UnsupportedError
from trtc.protos.kv import CacheLayout
from trtc.protos.manifest import ByteLedger, Limits, TargetFacts
from trtc.protos.progress import Progress
from trtc.quant.scheme import Scheme
from trtc.quant.site_format import DEFAULT_TABLES, TableFormats


@dataclass(frozen=True)
class CompileRequest:
    """The inputs of a target."""

    module: Module
    reader: TensorReader
    scheme: Scheme
    limits: Limits
    exact_activations: bool
    dummy_weights: bool
    workdir: Path
    """The engine under construction."""
    scratch: Path
    """For files that the engine does not keep; on the same disk."""
    tables: TableFormats = DEFAULT_TABLES
    """Of native targets; what it leaves open is theirs to say."""
    exact_weights: bool = False
    """CPU: bf16 weights keep all their bits."""
    ranks: int = 1
    """Devices that the model is spread over; at most the target's `max_ranks`."""
    ep: bool = False
    """Whether each of several devices has whole routed experts."""


@dataclass(frozen=True)
class Compiled:
    """What a target wrote into `workdir`, for the manifest."""

    facts: TargetFacts
    kv: CacheLayout
    ledger: ByteLedger
    notes: tuple[str, ...] = ()
    """What the user should know, a line each."""
    tables: TableFormats = DEFAULT_TABLES
    """Formats of the lm_head and the embeddings; None: the type of activations."""


def refuse_fp4(scheme: Scheme, name: str) -> None:
    """For targets without E2M1 activations.

    Raises:
        UnsupportedError: the scheme has them.
    """
    if scheme.activation == "f4e2m1":
        raise UnsupportedError(
            f"{name} has no FP4 arithmetic",
            field="--dtype",
            remedy="Use another scheme, or --target tensorrt:sm_120 or tensorrt-rtx:sm_120",
        )


def refuse_dynamic(scheme: Scheme, name: str) -> None:
    """For targets that quantise activations by scales of calibration.

    Raises:
        UnsupportedError: the scheme has others.
    """
    if scheme.dynamic:
        raise UnsupportedError(
            f"{name} quantises activations by static scales, and {scheme.name} has dynamic ones",
            field="--dtype",
            remedy="Use fp8 or int8_sq, or --target cpu or cuda",
        )


class Target(Protocol):
    """One kind of engine. Instances hold the parsed part after the colon of `--target`."""

    @property
    def name(self) -> str:
        """Resolved: `cpu:x86-64-v4`."""
        ...

    @property
    def runs_here(self) -> bool:
        """Whether this machine can run what it compiles, and so measure it."""
        ...

    @property
    def max_ranks(self) -> int:
        """How many devices an engine may be spread over."""
        ...

    @property
    def window_groups(self) -> bool:
        """Whether steps have a page table for each group of the cache layout, so that pages that a
        window has left are released. Otherwise every layer keeps every token."""
        ...

    @property
    def keeps_states(self) -> bool:
        """Whether it has kernels for layers that keep a state of each sequence."""
        ...

    @property
    def attends_to_latents(self) -> bool:
        """Whether it has kernels for latent attention."""
        ...

    @property
    def shares_keys(self) -> bool:
        """Whether layers may read the keys and values of earlier ones."""
        ...

    @property
    def has_layer_inputs(self) -> bool:
        """Whether it has kernels for inputs of each layer, beside what the one before it gives."""
        ...

    @property
    def has_sinks(self) -> bool:
        """Whether its attention takes sinks."""
        ...

    @property
    def rounds_rows(self) -> bool:
        """Whether it quantises activations by scales that follow from their rows. Checkpoints that
        want it keep their activations in bf16 otherwise."""
        ...

    @property
    def multiplies_fp4(self) -> bool:
        """Whether it multiplies E2M1 activations, or refuses to, and E2M1 weights of linears with
        no others. Otherwise NVFP4 checkpoints keep the weights alone, and in 4 bits."""
        ...

    @property
    def scales_kv(self) -> bool:
        """Whether its kernels take keys and values with a scale of each token and head."""
        ...

    def check_scheme(self, scheme: Scheme) -> None:
        """Say whether the target runs a scheme, whatever this machine has.

        Raises:
            UnsupportedError: it does not.
        """
        ...

    def check(self, scheme: Scheme) -> None:
        """Say before any work whether this machine can compile for the target.

        Raises:
            EnvironmentFault: a tool is missing (a C++ compiler, TensorRT); the message names it.
            UnsupportedError: the target cannot run the scheme.
        """
        ...

    def passes(self, request: CompileRequest) -> tuple[Pass, ...]:
        """The passes that the graph goes through for this target, in order."""
        ...

    def compile(self, request: CompileRequest, progress: Progress) -> Compiled:
        """Lower the rewritten module and write plan, code and weights into `request.workdir`."""
        ...

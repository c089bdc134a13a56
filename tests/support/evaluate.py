"""A checkpoint directory to an evaluator in one call, for tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.steps import Stepper
from trtc.builder.checkpoint.checkpoint import open_checkpoint
from trtc.builder.checkpoint.verify import settle_experts, settle_names, settle_prefix
from trtc.builder.evaluator import Evaluator
from trtc.builder.families.registry import checkpoint_spec
from trtc.builder.graph import GraphRequest, build_graph
from trtc.builder.module import Module
from trtc.builder.recipes import TensorReader
from trtc.protos.manifest import Limits
from trtc.quant.scheme import SCHEMES, CheckpointQuantization

PAGE_SIZE = 8
LIMITS = Limits(max_batch_size=4, max_seq_len=128, max_num_tokens=64)


def source_module(
    path: Path,
    scheme: str = "fp32",
    *,
    kv_dtype: str | None = None,
    quantization: CheckpointQuantization | None = None,
    max_seq_len: int = LIMITS.max_seq_len,
    page_size: int = PAGE_SIZE,
    window_groups: bool = False,
) -> tuple[Module, TensorReader]:
    """The source graph of a checkpoint, and the reader of its weights."""
    checkpoint = open_checkpoint(str(path))
    reader = checkpoint.open_weights()
    spec = settle_names(settle_prefix(checkpoint_spec(checkpoint, max_seq_len), reader), reader)
    spec = settle_experts(spec, reader)
    limits = Limits(
        max_batch_size=LIMITS.max_batch_size,
        max_seq_len=max_seq_len,
        max_num_tokens=LIMITS.max_num_tokens,
        rope_switch=spec.rope_switch,
    )
    named = SCHEMES[scheme]
    request = GraphRequest(
        named,
        kv_dtype or named.dtype,
        limits,
        quantization,
        page_size,
        window_groups=window_groups,
    )
    return build_graph(spec, request, reader), reader


def stepper(path: Path, scheme: str = "fp32", **options: Any) -> Stepper:
    """The checkpoint behind a pool of scrambled pages."""
    return steppers(path, scheme, **options)()


def steppers(path: Path, scheme: str = "fp32", **options: Any) -> Callable[[], Stepper]:
    """Gives steppers of a checkpoint that is read once, each with a pool of its own."""
    module, reader = source_module(path, scheme, **options)
    run = Evaluator(module, reader).run
    return lambda: Stepper(run, module.kv, scramble=1, limits=module.limits)

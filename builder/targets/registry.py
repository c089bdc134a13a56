"""`--target` to a target: a literal table."""

from collections.abc import Callable

from trtc.builder.targets.base import Target
from trtc.builder.targets.cpu import parse_cpu_target
from trtc.builder.targets.cuda import parse_cuda_target
from trtc.builder.targets.tensorrt.rtx import parse_tensorrt_rtx_target
from trtc.builder.targets.tensorrt.target import parse_tensorrt_target
from trtc.protos.errors import UnsupportedError

TARGETS: dict[str, Callable[[str], Target]] = {
    "cpu": parse_cpu_target,
    "cuda": parse_cuda_target,
    "tensorrt": parse_tensorrt_target,
    "tensorrt-rtx": parse_tensorrt_rtx_target,
}


def parse_target(name: str | None) -> Target:
    """The target called `name`; None: the best that this machine can build and run.

    Raises:
        UnsupportedError: no such target.
    """
    kind, _, detail = (name or "cpu").partition(":")
    if kind not in TARGETS:
        raise UnsupportedError(
            f"{kind!r} is not a target that this trtc builds",
            field="--target",
            remedy=f"Use one of {', '.join(TARGETS)}, as in cpu:x86-64-v3 or cuda:sm_90",
        )
    return TARGETS[kind](detail)

"""Which calls of a CUDA plan run beside the call before them (plugins/gpu/concurrent.py)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from trtc.plugins.gpu.concurrent import releasing_late, waiting_last
from trtc.plugins.gpu.lowering import SCRATCH, Gemm, Launch, Variant
from trtc.plugins.op import FusedOp
from trtc.protos.plan import Argument, Call, Plan, buffer_bytes

Variants = tuple[Variant, ...]


def overlap_calls(
    plan: Plan, operators: Mapping[str, FusedOp], calls: Sequence[Variants]
) -> list[Variants]:
    """The variants of every call of the plan, where the first launch of a call starts without
    waiting for the call before it if it reads and writes nothing that this one writes, and writes
    nothing that it reads.

    Buckets and tactics choose the variants of two calls apart, so every one of the first call may
    come before any of the second.
    """
    memory = _Memory(plan, operators)
    found = list(calls)
    second = 1
    while second < len(found):
        leaders, followers = found[second - 1], found[second]
        apart = [
            all(map(_can_lead, leaders))
            and memory.is_apart(plan.calls[second - 1], leaders, plan.calls[second], follower)
            for follower in followers
        ]
        if any(apart):
            found[second - 1] = tuple(_replaced(one, -1, releasing_late) for one in leaders)
            found[second] = tuple(
                _replaced(one, 0, waiting_last) if is_apart else one
                for one, is_apart in zip(followers, apart, strict=True)
            )
            second += 1  # a call that does not wait cannot say that those before it are done
        second += 1
    return found


def _can_lead(variant: Variant) -> bool:
    """Whether what comes after the call may start when its last launch's wait is over: not after a
    collective, nor where some buckets leave that launch out, or there is none."""
    last = variant.work[-1] if variant.work else None
    is_there = isinstance(last, Launch) and not last.least_splits
    return is_there or isinstance(last, Gemm)


def _replaced(variant: Variant, place: int, change: Callable[[Launch], Launch]) -> Variant:
    """With one launch changed."""
    work = list(variant.work)
    one = work[place]
    if isinstance(one, Launch):
        work[place] = change(one)
    return replace(variant, work=tuple(work))


@dataclass(frozen=True)
class _Span:
    """Bytes of the arena that a launch reads or writes."""

    begin: int
    end: int
    is_written: bool

    def conflicts(self, other: "_Span") -> bool:
        overlaps = self.begin < other.end and other.begin < self.end
        return overlaps and (self.is_written or other.is_written)


class _Memory:
    """What launches read and write of the arena."""

    def __init__(self, plan: Plan, operators: Mapping[str, FusedOp]) -> None:
        # A step has no more logit rows than sequences (see step_block).
        limits = plan.limits
        rows = msgspec.structs.replace(limits, max_num_tokens=limits.max_batch_size)
        self._operators = operators
        self._buffers = {
            one.name: (
                one.offset,
                one.offset + buffer_bytes(one, rows if one.rows == "R" else limits),
            )
            for one in plan.buffers
        }

    def is_apart(
        self, call: Call, leaders: Sequence[Variant], next_call: Call, follower: Variant
    ) -> bool:
        """Whether the first launch of `follower` may run beside all of `leaders`."""
        launch = follower.work[0] if follower.work else None
        if not isinstance(launch, Launch) or not (launch.overlaps and launch.may_wait_last):
            return False
        names = {*launch.arguments, *(one.parameter for one in launch.maps)}
        if any(name.startswith(SCRATCH) for name in names) and any(one.scratch for one in leaders):
            return False
        given = [one for one in next_call.arguments if one.parameter in names]
        if any(one.kind in ("pool", "logits") for one in given):
            return False
        theirs = list(self._spans(call, call.arguments))
        ours = self._spans(next_call, given)
        return not any(one.conflicts(other) for one in ours for other in theirs)

    def _spans(self, call: Call, arguments: Sequence[Argument]) -> Iterator[_Span]:
        written = {output.name for output in self._operators[call.operator].outputs}
        for one in arguments:
            if one.kind == "buffer":
                yield _Span(*self._buffers[one.name], is_written=one.parameter in written)

"""Ranks without a GPU, each a process, over the echo executor: python -m tests.support.rank_worker.

Every rank holds the whole (imaginary) model, so nothing is exchanged: what is tested is how they
are led, and what happens when one of them ends, hangs or goes astray.
"""

import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from tests.support.lazy import LazyEcho, LazyStep
from trtc.protos.errors import EngineCorruptError, EnvironmentFault
from trtc.runtime.executors.base import Executor, StepBatch
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.executors.ranks.executor import LocalRank, ShardedExecutor, open_ranks
from trtc.runtime.executors.ranks.group import Patience, RankGroup
from trtc.runtime.executors.ranks.link import Link
from trtc.runtime.executors.ranks.messages import Open, Order
from trtc.runtime.executors.ranks.worker import serve_rank
from trtc.runtime.sampling.sampler import SamplingBatch

SHORT = Patience(start=30.0, open=30.0, step=5.0, grace=1.0)


@dataclass(frozen=True)
class Role:
    """What a rank does, rightly or wrongly."""

    options: EchoOptions = field(default_factory=EchoOptions)
    fault: str = ""
    """no device, corrupt, bug, slow opening: at the start; or device fails: at the third step."""


class FollowingEcho(LazyEcho):
    """A step may have ended before the next one, which continues it, is launched."""

    def queue(self, batch: StepBatch, sampling: SamplingBatch | None) -> LazyStep:
        step = LazyStep(self, batch, sampling)
        self._in_flight.append(step)
        self._stream.append(step.compute)
        return step


@dataclass(frozen=True)
class EchoRank:
    """Implements RankHost."""

    role: Role

    def free_bytes(self) -> int:
        if self.role.fault == "no device":
            raise EnvironmentFault("there is no GPU 1", field="GPU 1", remedy="Plug one in")
        return 1 << 30

    def open(self, order: Open) -> Executor:
        match self.role.fault:
            case "corrupt":
                raise EngineCorruptError("is torn", field=f"weights.rank{order.rank}")
            case "bug":
                raise KeyError("a bug")
            case "slow opening":
                time.sleep(60.0)
            case "device fails":
                return FollowingEcho(replace(self.role.options, fail_at_step=2))
        return FollowingEcho(self.role.options)


class LocalEcho(LazyEcho):
    """Rank 0 (implements LocalRank)."""

    def __init__(self, options: EchoOptions) -> None:
        super().__init__(options)
        self.abandoned = threading.Event()

    def abandon(self) -> None:
        self.abandoned.set()


def command(role: Role) -> list[str]:
    return [sys.executable, "-m", "tests.support.rank_worker", msgspec.json.encode(role).decode()]


@contextmanager
def group_of(*roles: Role, patience: Patience = SHORT) -> Any:
    """The other ranks; none of them is left at the end."""
    group = RankGroup([command(role) for role in roles], patience)
    try:
        yield group
    finally:
        group.close()
        for pid in group.pids:
            assert not Path(f"/proc/{pid}").exists(), "a rank was left behind"


def open_echo_ranks(
    group: RankGroup, local: Callable[[], LocalRank], engine: Path = Path()
) -> ShardedExecutor:
    return open_ranks(
        group, engine=engine, num_pages=8, dummy_weights=False, rendezvous=b"", local=local
    )


def main() -> None:
    role = msgspec.json.decode(sys.argv[1], type=Role)
    link: Link[Order] = Link(socket.socket(fileno=int(sys.argv[2])), Order)
    sys.exit(serve_rank(link, EchoRank(role)))


if __name__ == "__main__":
    main()

"""A real (tiny) model on several processes without a GPU: each rank's graph by the evaluator.

python -m tests.support.evaluated_ranks SCHEME RANK RANKS SOCKET
"""

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import asdict

from tests.builder.passes.tiny import Tiny, scheme_of, tiny
from tests.support.caches import new_pools, outputs_as_inputs
from tests.support.mesh import Mesh
from tests.support.ranks import module_of_rank
from trtc.builder.evaluator import Evaluator, Exchange, alone
from trtc.builder.passes.base import run_passes
from trtc.builder.passes.order import cuda_passes
from trtc.runtime.executors.base import (
    Bytes,
    ExecutorSizes,
    Float32s,
    PageRead,
    PendingStep,
    StepBatch,
    UndrawnStep,
)
from trtc.runtime.executors.ranks.link import Link
from trtc.runtime.executors.ranks.messages import Open, Order
from trtc.runtime.executors.ranks.worker import serve_rank
from trtc.runtime.sampling.sampler import SampledTokens, SamplingBatch, sample

NUM_PAGES = 32


@dataclass(frozen=True)
class _Computed:
    tokens: SampledTokens

    def wait(self) -> SampledTokens:
        return self.tokens


@dataclass(frozen=True)
class _Forward:
    logits: Float32s

    def draw(self, sampling: SamplingBatch) -> PendingStep:
        return _Computed(sample(self.logits, sampling))


class EvaluatedExecutor(ExecutorSizes):
    """One rank of a tiny model, or all of it (implements LocalRank)."""

    def __init__(self, kind: Tiny, rank: int = 0, ranks: int = 1, mesh: Mesh | None = None) -> None:
        module, reader = tiny(kind)
        module, _ = run_passes(module, cuda_passes(scheme_of(kind), reader, ranks))
        exchange: Exchange = alone if mesh is None else mesh.exchange
        self._run = Evaluator(module_of_rank(module, rank), reader, exchange).run
        vocab_size = module.model.graph.output[0].type.tensor_type.shape.dim[1].dim_value
        super().__init__(module.limits, module.kv, vocab_size, NUM_PAGES)
        self._mesh = mesh
        self._pools = new_pools(self._kv, NUM_PAGES)

    @property
    def runs_ahead(self) -> bool:
        return False

    @property
    def counts_pending(self) -> bool:
        return False

    @property
    def draft_rows(self) -> None:
        return None

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> PendingStep:
        return _Computed(sample(self.logits(batch), sampling))

    def launch_forward(self, batch: StepBatch) -> UndrawnStep:
        return _Forward(self.logits(batch))

    def logits(self, batch: StepBatch) -> Float32s:
        inputs = {name: array for name, array in asdict(batch).items() if array is not None}
        outputs = self._run(inputs | self._pools)
        self._pools = outputs_as_inputs(self._pools, outputs)
        return outputs["logits"]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            for pool in self._pools.values():
                pool[target] = pool[source]

    @property
    def moves_pages(self) -> bool:
        return False

    @property
    def keeps_weights(self) -> bool:
        return False

    def weights_on_host(self) -> Bytes:
        raise AssertionError("a rank is not asked for weights")

    def read_pages(self, pages: Sequence[int]) -> PageRead:
        raise AssertionError("a rank is not asked for pages")

    def write_pages(self, pages: Sequence[int], data: Bytes) -> None:
        raise AssertionError("a rank is not asked for pages")

    def check(self) -> None:
        pass

    def abandon(self) -> None:
        self.close()

    def close(self) -> None:
        if self._mesh is not None:
            self._mesh.close()


@dataclass(frozen=True)
class EvaluatedRank:
    """Implements RankHost."""

    scheme: str
    rank: int
    ranks: int

    def free_bytes(self) -> int:
        return 1 << 30

    def open(self, order: Open) -> EvaluatedExecutor:
        mesh = Mesh(Path(order.rendezvous.decode()), self.rank, self.ranks)
        return EvaluatedExecutor(kind_of(self.scheme), self.rank, self.ranks, mesh)


def kind_of(scheme: str) -> Tiny:
    """In f32, where the ranks' sums are those of one rank but for their last bits."""
    return Tiny(scheme, dtype="f32")


def command(scheme: str, rank: int, ranks: int) -> list[str]:
    return [sys.executable, "-m", __name__, scheme, str(rank), str(ranks)]


def main() -> None:
    scheme, rank, ranks, descriptor = sys.argv[1:]
    link: Link[Order] = Link(socket.socket(fileno=int(descriptor)), Order)
    sys.exit(serve_rank(link, EvaluatedRank(scheme, int(rank), int(ranks))))


if __name__ == "__main__":
    main()

"""Opens a CPU engine: the best code for this processor, over mapped or random weights."""

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.cpu.host import object_file, read_cpu_flags, runnable_isas
from trtc.plugins.cpu.isa import ISAS
from trtc.protos.errors import EngineIncompatibleError, RequestError
from trtc.protos.manifest import PLAN_FILE, WEIGHTS_FILE, Manifest
from trtc.runtime.executors.cpu import CpuEngineFiles, CpuExecutor
from trtc.runtime.executors.opening import OpenRequest
from trtc.runtime.executors.weights import dummy_weights, map_weights
from trtc.runtime.host.machine import (
    available_bytes,
    num_usable_cores,
    num_usable_cpus,
    usable_cores,
)

_POOL_SHARE = 0.5


class CpuOpening(NamedTuple):
    """A CPU engine with code for this machine (implements Opening)."""

    request: OpenRequest
    isa: str

    @property
    def files(self) -> tuple[str, ...]:
        objects = (object_file(isa) for isa in self.request.manifest.target.archs)
        weights = () if self.request.dummy_weights else (WEIGHTS_FILE,)
        return (PLAN_FILE, *objects, *weights)

    @property
    def pool_share(self) -> float:
        return _POOL_SHARE

    @property
    def max_pages(self) -> int | None:
        return None

    def free_bytes(self) -> int:
        """Free memory; mapped weights are in the page cache, dummy ones in this process."""
        ledger = self.request.manifest.ledger
        weights = ledger.weights if self.request.dummy_weights else 0
        return available_bytes() - ledger.activations - weights

    def close(self) -> None:
        """Nothing to release."""

    def open(self, num_pages: int) -> CpuExecutor:
        engine, manifest = self.request.engine, self.request.manifest
        plan_path = engine / PLAN_FILE
        code = object_file(self.isa)
        num_threads = self.request.num_threads or num_usable_cores()
        cores = usable_cores()
        return CpuExecutor(
            CpuEngineFiles(
                shared_object=engine / code,
                weights=self._weights(),
                plan_digest=hashlib.sha256(plan_path.read_bytes()).hexdigest(),
                weights_path=None if self.request.dummy_weights else engine / WEIGHTS_FILE,
                code_sha256=manifest.files[code].sha256 if self.request.verify else None,
            ),
            limits=manifest.limits,
            kv=manifest.kv,
            vocab_size=manifest.model.vocab_size,
            num_pages=num_pages,
            num_threads=num_threads,
            # With spare cores there is no pinning: the system avoids cores of other processes.
            cpus=cores if num_threads == len(cores) else (),
            quick_start=self.request.quick_start,
        )

    def _weights(self) -> NDArray[np.uint8]:
        request, engine = self.request, self.request.engine
        if request.weights is not None:
            return request.weights
        if request.dummy_weights:
            return dummy_weights(engine / PLAN_FILE)
        num_bytes, found = request.manifest.ledger.weights, request.found.get(WEIGHTS_FILE)
        return map_weights(engine / WEIGHTS_FILE, num_bytes, found)


def prepare_cpu(request: OpenRequest) -> CpuOpening:
    """Choose the best instruction set that both the engine and this machine have.

    Raises:
        EngineIncompatibleError: there is none.
        RequestError: there are more threads than CPUs; they would wait for each other at every
            operator.
    """
    num_threads, num_cpus = request.num_threads, num_usable_cpus()
    if num_threads is not None and num_threads > num_cpus:
        raise RequestError(
            f"is {num_threads}, and this process may run on {num_cpus} CPUs",
            field="--threads",
            remedy=f"Give at most {num_cpus}, or leave it out",
        )
    return CpuOpening(request, _pick_isa(request.manifest))


def _pick_isa(manifest: Manifest) -> str:
    runnable = runnable_isas()
    for isa in runnable:
        if isa in manifest.target.archs:
            return isa
    least = ISAS.get(manifest.target.archs[-1])
    missing = sorted(least.cpu_flags - read_cpu_flags()) if least is not None else []
    lacks = f" and lacks {', '.join(missing)}" if missing else ""
    raise EngineIncompatibleError(
        f"the engine has code for {', '.join(manifest.target.archs)}, "
        f"this machine runs {', '.join(runnable)}{lacks}",
        field="manifest.json: target.archs",
        remedy=f"Build with --target cpu:{runnable[0]}",
    )

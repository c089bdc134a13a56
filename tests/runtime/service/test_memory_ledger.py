"""Whether an engine fits beside those that are open."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
import pytest

from tests.support.servers import EchoEngine, manifest, open_echo
from trtc.protos.errors import EnvironmentFault, RequestError
from trtc.protos.manifest import ByteLedger, Manifest
from trtc.runtime.engine.config import EngineConfig
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.executors.room import Place
from trtc.runtime.service.memory_ledger import MemoryLedger

GB = 10**9
CONFIG = EngineConfig()


def facts(kind: str = "cpu", weights: int = 4 * GB, tp: int = 1) -> Manifest:
    """An engine of 1 GB of activations and pages of 0.1 GB, of which a sequence has 64."""
    found = manifest(EchoEngine(), EchoExecutor(EchoOptions()))
    target = msgspec.structs.replace(found.target, kind=kind, tp=tp)
    ledger = ByteLedger(weights=weights, activations=GB, page=GB // 10)
    return msgspec.structs.replace(found, target=target, ledger=ledger)


@dataclass
class Memory:
    """What a machine and its system say."""

    available: int
    resident: int = GB // 5

    def ledger(self, *, has_several: bool = True) -> MemoryLedger:
        return MemoryLedger(
            has_several=has_several, free_bytes=self._free, resident=lambda: self.resident
        )

    def _free(self, place: Place) -> int:
        return self.available


@pytest.fixture
def opened() -> Iterator[EngineHandle]:
    engine = open_echo(EchoEngine(), "first", CONFIG)
    yield msgspec.structs.replace(engine, manifest=facts(), num_pages=100)
    engine.loop.stop()
    engine.close()


def test_an_engine_needs_weights_activations_and_the_pool_that_is_asked_for() -> None:
    ledger = Memory(20 * GB).ledger()
    assert ledger.pool_bytes("a", facts(), replace(CONFIG, kv_bytes=15 * GB)) == 15 * GB
    with pytest.raises(EnvironmentFault) as refused:
        ledger.pool_bytes("a", facts(), replace(CONFIG, kv_bytes=16 * GB))
    assert refused.value.problem == (
        "a needs 21.00 GB of the host's memory (5.00 GB for weights and activations, 16.00 GB of "
        "KV pool), and 20.00 GB are free"
    )


def test_without_a_size_a_pool_takes_half_of_the_rest_and_one_sequence_at_least() -> None:
    assert Memory(105 * GB).ledger().pool_bytes("a", facts(), CONFIG) == 50 * GB
    assert Memory(12 * GB).ledger().pool_bytes("a", facts(), CONFIG) == 64 * GB // 10
    with pytest.raises(EnvironmentFault, match=r"needs 11\.40 GB"):
        Memory(11 * GB).ledger().pool_bytes("a", facts(), CONFIG)


def test_what_open_engines_may_still_take_is_not_free(opened: EngineHandle) -> None:
    memory = Memory(30 * GB)
    ledger = memory.ledger()
    ledger.hold(opened)  # 4 + 1 + 10 GB, of which nothing is taken yet
    with pytest.raises(EnvironmentFault, match=r"15\.00 GB are free; held by: first 15\.00 GB"):
        ledger.pool_bytes("a", facts(), replace(CONFIG, kv_bytes=11 * GB))
    memory.resident += 6 * GB  # of its pool, and so no more available
    memory.available -= 6 * GB
    with pytest.raises(EnvironmentFault, match=r"15\.00 GB are free"):
        ledger.pool_bytes("a", facts(), replace(CONFIG, kv_bytes=11 * GB))
    assert ledger.release(opened) == 15 * GB
    assert ledger.release(opened) == 0
    memory.available, memory.resident = 30 * GB, GB // 5
    assert ledger.pool_bytes("a", facts(), replace(CONFIG, kv_bytes=11 * GB)) == 11 * GB


def test_models_that_share_a_gpu_have_pools_of_a_size_that_was_given(opened: EngineHandle) -> None:
    ledger = Memory(20 * GB).ledger()
    ledger.hold(opened)  # of the host: another device
    with pytest.raises(RequestError, match="--kv-bytes: is needed for a: several models share"):
        ledger.pool_bytes("a", facts("cuda"), CONFIG)
    assert ledger.pool_bytes("a", facts("cuda"), replace(CONFIG, kv_bytes=15 * GB)) == 15 * GB
    with pytest.raises(EnvironmentFault, match=r"of GPU memory .* and 20\.00 GB are free\. Unload"):
        ledger.pool_bytes("a", facts("cuda"), replace(CONFIG, kv_bytes=16 * GB))
    assert Memory(20 * GB).ledger(has_several=False).pool_bytes("a", facts("cuda"), CONFIG) is None
    assert ledger.pool_bytes("a", facts("cuda", 99 * GB, tp=2), CONFIG) is None  # ranks look

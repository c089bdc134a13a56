"""Checks whether another engine fits in memory.

    on a host:  free = available now + bytes that engines use now - bytes reserved by open engines
    on a GPU:   free = the driver's free memory; an open engine has allocated all of its memory

A host commits memory on first access, so a part of the available memory is already reserved: for
weights that are mapped and not read yet, and for pages of KV pools that no request has used. All
memory of an engine counts as reserved from its opening on.
"""

from collections.abc import Callable
from dataclasses import dataclass

from trtc.protos.errors import EnvironmentFault, RequestError
from trtc.protos.manifest import Manifest
from trtc.runtime.engine.config import EngineConfig
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.executors.room import PLACES, Place
from trtc.runtime.executors.weights import KeptWeights
from trtc.runtime.host.machine import resident_bytes

_POOL_SHARE = 0.5
"""Largest share of the host's free memory for a KV pool without a given size."""


@dataclass(frozen=True)
class Claim:
    """Memory reserved by an open engine."""

    name: str
    device: str
    num_bytes: int


class MemoryLedger:
    """Memory reserved by the engines of a server. Thread-safe.

    Args:
        free_bytes: free memory of a place; replaced in tests.
        has_several: whether several models share each device.
    """

    def __init__(
        self,
        *,
        has_several: bool,
        free_bytes: Callable[[Place], int] = Place.free_bytes,
        resident: Callable[[], int] = resident_bytes,
    ) -> None:
        self._has_several = has_several
        self._free_bytes = free_bytes
        self._resident = resident
        self._own = resident()
        """Resident bytes of the process before any engine was opened."""
        self._claims: dict[int, Claim] = {}
        """Claims by the identity of the engine or of its kept weights."""

    def pool_bytes(self, name: str, manifest: Manifest, config: EngineConfig) -> int | None:
        """Bytes of the KV pool to open an engine with; None: the session chooses.

        Raises:
            EnvironmentFault: the engine does not fit. The message has the bytes needed, the bytes
                free and the holders of the rest.
            RequestError: the size must be given, because several models share a GPU.
        """
        place, ledger = PLACES[manifest.target.kind], manifest.ledger
        if manifest.target.tp > 1:
            return config.kv_bytes  # each rank checks its own GPU when it opens
        if not place.is_host and self._has_several and config.kv_bytes is None:
            raise RequestError(
                f"is needed for {name}: several models share the GPU, and one alone would take "
                "all of it",
                field="--kv-bytes",
                remedy="Give the bytes of each model's KV pool",
            )
        base = ledger.weights + ledger.activations
        least = config.kv_bytes
        if least is None:
            least = ledger.page * manifest.kv.pages_of_sequence(manifest.limits.max_seq_len)
        free = self._free(place)
        if base + least > free:
            raise self._refusal(name, place, base, least, free)
        if config.kv_bytes is not None or not place.is_host:
            return config.kv_bytes
        wanted = manifest.limits.max_batch_size * least
        return max(least, min(wanted, int((free - base) * _POOL_SHARE)))

    def hold(self, engine: EngineHandle) -> None:
        """Reserve the memory of an engine that was opened."""
        manifest = engine.manifest
        ledger = manifest.ledger
        num_bytes = ledger.weights + ledger.activations + ledger.page * engine.num_pages
        device = PLACES[manifest.target.kind].device
        self._claims[id(engine)] = Claim(engine.name, device, num_bytes)

    def hold_weights(self, name: str, weights: KeptWeights) -> None:
        """Reserve the host memory of a closed engine's weights."""
        device = PLACES["cpu"].device
        self._claims[id(weights)] = Claim(f"{name}, asleep,", device, weights.data.nbytes)

    def release(self, holder: EngineHandle | KeptWeights) -> int:
        """Release the claim of a closed engine or of dropped weights; returns its bytes."""
        claim = self._claims.pop(id(holder), None)
        return 0 if claim is None else claim.num_bytes

    def _free(self, place: Place) -> int:
        free = self._free_bytes(place)
        if not place.is_host:
            return free
        claimed = sum(one.num_bytes for one in self._claims_of(place))
        taken = max(0, self._resident() - self._own)
        return free + min(taken, claimed) - claimed

    def _claims_of(self, place: Place) -> list[Claim]:
        # A copy first: engines retire in another thread.
        return [one for one in tuple(self._claims.values()) if one.device == place.device]

    def _refusal(
        self, name: str, place: Place, base: int, pool: int, free: int
    ) -> EnvironmentFault:
        holders = self._claims_of(place)
        held = ", ".join(f"{one.name} {_size(one.num_bytes)}" for one in holders)
        return EnvironmentFault(
            f"{name} needs {_size(base + pool)} of {place.device} ({_size(base)} for weights and "
            f"activations, {_size(pool)} of KV pool), and {_size(max(0, free))} are free"
            + (f"; held by: {held}" if held else ""),
            field="model",
            remedy="Unload a model, or give a smaller KV pool (--kv-bytes)",
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"

"""Whether an engine fits beside those that are open: bytes that it will take against bytes free.

    on a host:  free = available now + what engines have taken - what open engines may take
    on a GPU:   free = what the driver says; an open engine has taken all that it will

A host gives memory as it is touched, so what is available now is partly promised: weights that are
mapped and not read yet, pages of KV pools that no request has used. All that an engine may take
counts from its opening on.
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
"""Of the host's free memory that a pool takes at most whose size nobody gave."""


@dataclass(frozen=True)
class Claim:
    """What an open engine may take."""

    name: str
    device: str
    num_bytes: int


class MemoryLedger:
    """Safe from any thread.

    Args:
        free_bytes: of a place; a test's own.
        has_several: whether several models are to share each device.
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
        """Of the process, before engines."""
        self._claims: dict[int, Claim] = {}
        """By the identity of the engine."""

    def pool_bytes(self, name: str, manifest: Manifest, config: EngineConfig) -> int | None:
        """The size of the KV pool that an engine is to be opened with; None: what it chooses.

        Raises:
            EnvironmentFault: the engine does not fit; says what it needs, what is free and who
                holds the rest.
            RequestError: the size must be given, as several models share a GPU.
        """
        place, ledger = PLACES[manifest.target.kind], manifest.ledger
        if manifest.target.tp > 1:
            return config.kv_bytes  # each rank looks at its own GPU when it opens
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
        """An engine was opened."""
        manifest = engine.manifest
        ledger = manifest.ledger
        num_bytes = ledger.weights + ledger.activations + ledger.page * engine.num_pages
        device = PLACES[manifest.target.kind].device
        self._claims[id(engine)] = Claim(engine.name, device, num_bytes)

    def hold_weights(self, name: str, weights: KeptWeights) -> None:
        """Weights of a closed engine stay in the host's memory."""
        device = PLACES["cpu"].device
        self._claims[id(weights)] = Claim(f"{name}, asleep,", device, weights.data.nbytes)

    def release(self, holder: EngineHandle | KeptWeights) -> int:
        """An engine was closed, or weights were let go: the bytes that it might take."""
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

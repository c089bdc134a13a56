"""The products of experts with E2M1 weights for many rows of each, on sm_90 (e2m1_wide_sm90.cu)."""

from collections.abc import Mapping
from dataclasses import dataclass

from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.lowering import Launch, Site
from trtc.plugins.gpu.sources import CudaSource
from trtc.plugins.moe.e2m1_sm90 import (
    CHUNK_BYTES,
    PAIR_LISTS,
    Pairs,
    Product,
    bias_argument,
    given_argument,
    given_constants,
    is_plain,
    product_constants,
    product_launch,
)
from trtc.plugins.moe.e2m1_tiles_sm90 import list_bytes, tile_weight_map

_BLOCK_ROWS = 192
"""Rows of an expert that are multiplied at once, at most."""
_ROW_STEP = 96
"""Rows of a product are a multiple of it. With a third size of products ptxas serialises them."""
_STEP_CHANNELS = 64
"""Of rows of x, in a stage."""
_TEAM_THREADS = 128
_PRODUCERS = 128
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 56, 152
_X_STAGES, _WEIGHT_STAGES = 6, 2


@dataclass(frozen=True)
class WideCut:
    """How the kernel divides a product: a thread block has `teams` times 64 rows of the weight."""

    teams: int = 3

    def takes(self, site: Site, pairs: Pairs) -> bool:
        """Whether both products are in whole steps and rows of the weight's map."""
        hidden, inner = site.axes["H"], site.axes["I"]
        return (
            is_plain(site)
            and hidden % _STEP_CHANNELS == 0
            and inner % _STEP_CHANNELS == 0
            and self._shared_bytes(site) <= ARCHS[site.sm].shared_bytes
        )

    def buffers(self, site: Site, pairs: Pairs) -> Mapping[str, tuple[str, int]]:
        """Scratch beside that of every tile: element type and count."""
        return {}

    def launches(self, site: Site, product: Product, pairs: Pairs) -> tuple[Launch, ...]:
        """One launch of the kernel."""
        shared_bytes = self._shared_bytes(site)
        return (
            product_launch(
                site,
                product,
                {
                    **given_argument(product),
                    "scale": (f"{product}_scale", "u8"),
                    **bias_argument(site, product),
                    **PAIR_LISTS,
                },
                CudaSource(
                    file="moe/e2m1_wide_sm90.cu",
                    entry="experts_e2m1_wide",
                    parameters=(),
                    constants={
                        **product_constants(site, product, pairs),
                        **given_constants(site, product),
                        "BLOCK_ROWS": _BLOCK_ROWS,
                        "ROW_STEP": _ROW_STEP,
                        "TEAMS": self.teams,
                        "X_STAGES": _X_STAGES,
                        "WEIGHT_STAGES": _WEIGHT_STAGES,
                        "SHARED_BYTES": shared_bytes,
                        "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
                        "CONSUMER_REGISTERS": _CONSUMER_REGISTERS,
                    },
                    num_threads=self.teams * _TEAM_THREADS + _PRODUCERS,
                    shared_bytes=shared_bytes,
                ),
                tile_weight_map(site, product, self.teams),
            ),
        )

    def _shared_bytes(self, site: Site) -> int:
        """Of `Shared` in e2m1_wide_sm90.cu."""
        x = _BLOCK_ROWS * _STEP_CHANNELS * 2
        weights = self.teams * 64 * CHUNK_BYTES
        stages = _X_STAGES * (x + 2 * 8) + _WEIGHT_STAGES * (weights + 2 * 8)
        return -(-(stages + list_bytes(site)) // 1024) * 1024

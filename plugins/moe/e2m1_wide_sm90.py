"""The products of experts with E2M1 weights for many rows of each, on sm_90 (e2m1_wide_sm90.cu)."""

from collections.abc import Mapping
from dataclasses import dataclass

from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.lowering import Launch, Site
from trtc.plugins.moe.e2m1_sm90 import (
    CHUNK_BYTES,
    Pairs,
    Product,
    given_argument,
    given_constants,
    is_plain,
)
from trtc.plugins.moe.e2m1_tiles_sm90 import list_bytes, tiles_launch

_BLOCK_ROWS = 192
"""Rows of an expert that are multiplied at once, at most."""
_ROW_STEP = 96
"""Rows of a product are a multiple of it. With a third size of products ptxas serialises them."""
_STEP_CHANNELS = 64
"""Of rows of x, in a stage."""
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
        return (
            tiles_launch(
                site,
                product,
                pairs,
                kind="wide",
                operand=given_argument(product),
                teams=self.teams,
                shared_bytes=self._shared_bytes(site),
                constants={
                    **given_constants(site, product),
                    "BLOCK_ROWS": _BLOCK_ROWS,
                    "ROW_STEP": _ROW_STEP,
                    "X_STAGES": _X_STAGES,
                    "WEIGHT_STAGES": _WEIGHT_STAGES,
                    "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
                    "CONSUMER_REGISTERS": _CONSUMER_REGISTERS,
                },
            ),
        )

    def _shared_bytes(self, site: Site) -> int:
        """Of `Shared` in e2m1_wide_sm90.cu."""
        x = _BLOCK_ROWS * _STEP_CHANNELS * 2
        weights = self.teams * 64 * CHUNK_BYTES
        stages = _X_STAGES * (x + 2 * 8) + _WEIGHT_STAGES * (weights + 2 * 8)
        return -(-(stages + list_bytes(site)) // 1024) * 1024

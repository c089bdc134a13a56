"""Tiles of attention on sm_90: what the launches of kernels that include tiles_sm90.cuh share."""

from collections.abc import Mapping
from dataclasses import dataclass

from trtc.plugins.gpu.arch import SM_90
from trtc.plugins.gpu.lowering import Site, TileMap
from trtc.protos.dtypes import DTYPES

ROWS = 128
"""Of a tile: tokens times the heads of a group."""
THREADS = 384
PROGRAMS = SM_90.multiprocessors
"""Persistent programs, which take tiles from a counter."""
PANEL_BYTES = 128
"""Of a row of a panel in shared memory."""
_PANEL_ELEMENTS = 64
_ALIGNMENT = 1024
"""Bytes. Of the panels, and so of all shared memory's size."""
_BOOKKEEPING = 1024


@dataclass(frozen=True)
class Tile:
    """Tactic of a program for a tile of 128 rows."""

    block_n: int
    """Keys of a product."""
    stages: int
    """Blocks of keys in shared memory, and as many of values."""
    producer_registers: int
    consumer_registers: int
    """Of a thread: 128 producers and 256 consumers share 65536."""

    @property
    def constants(self) -> Mapping[str, int]:
        return {
            "BLOCK_N": self.block_n,
            "STAGES": self.stages,
            "PRODUCER_REGISTERS": self.producer_registers,
            "CONSUMER_REGISTERS": self.consumer_registers,
        }

    def shared_bytes(self, head_dim: int, value_dim: int, more: int) -> int:
        """Queries, and stages of K and V, in panels; bookkeeping and `more`."""
        keys, values = (
            -(-columns // _PANEL_ELEMENTS) * PANEL_BYTES for columns in (head_dim, value_dim)
        )
        panels = ROWS * keys + self.stages * self.block_n * (keys + values)
        return -(-(panels + _BOOKKEEPING + more) // _ALIGNMENT) * _ALIGNMENT


def query_map(site: Site, head_dim: int, group: int) -> TileMap:
    """[tokens, heads, bytes of a head], by the heads of a group."""
    q = DTYPES[site.dtypes["q"]]
    head = q.num_bytes(head_dim)
    tokens, heads = site.limits.max_num_tokens, int(site.attributes["num_heads"])
    return TileMap(
        parameter="q",
        sizes=(head, heads, tokens),
        strides=(head, q.num_bytes(site.strides["q"])),
        box=(PANEL_BYTES, group, ROWS // group),
    )

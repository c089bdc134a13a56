"""Weights of which nothing but their size is known."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightBytes:
    """As trtc.quant.device's Movable."""

    num_bytes: int
    bytes_at_work: int

    def to(self, device: str) -> None:
        raise AssertionError(f"nothing moves to {device}")


def whole(num_bytes: int) -> WeightBytes:
    return WeightBytes(num_bytes, num_bytes)

"""The configuration of a server's hooks; without one, nothing else of them is imported."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HooksConfig:
    """Which hooks a server calls, and how."""

    name: str
    """`module:Class`"""
    timeout_s: float = 1.0
    """What one call may take."""
    num_processes: int = 2
    """A request stays with one of them."""

"""The configuration of a server's hooks; without hooks, only this module is imported."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HooksConfig:
    """Which hooks a server calls, and how."""

    name: str
    """`module:Class`"""
    timeout_s: float = 1.0
    """Timeout of one call."""
    num_processes: int = 2
    """Processes; all calls of a request go to the same one."""

"""Settings of a model: the parameters of its config.pbtxt, which an operator may edit."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trtc.protos.errors import RequestError

_TRUTH = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Settings:
    """Parameters of a model, with the names of tensorrtllm_backend where it has the same one."""

    exclude_input_in_output: bool = True
    """Default of requests: leave the prompt out of the answer. (In tensorrtllm_backend it is false,
    and all its examples set true.)"""
    enable_kv_cache_reuse: bool = True
    """Whether to keep a prefix cache."""
    cancellation_check_period_ms: int = 100
    """Milliseconds between checks for cancelled requests."""
    max_queue: int = 1024
    """Most requests that wait; further ones are refused."""
    num_threads: int | None = None
    """CPU threads; None: one for each usable core."""
    kv_bytes: int | None = None
    """Bytes of the KV pool; None: enough for a full batch, if they are free."""
    kv_cache_host_memory_bytes: int | None = None
    """Bytes of host memory for cached prefixes that the pool has no room for; None: no host
    tier."""

    def as_parameters(self) -> dict[str, str]:
        """The parameters as texts; "" is None."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: _written(value) for name, value in values.items()}


def read_settings(parameters: Mapping[str, str]) -> Settings:
    """Settings from the parameters of a model; those of Triton itself are in capitals, and ignored.

    Raises:
        RequestError: a parameter is unknown or has an invalid value; names it.
    """
    defaults = Settings()
    known = {one.name for one in fields(defaults)}
    given: dict[str, Any] = {}
    for name, text in parameters.items():
        if name in known:
            given[name] = _read(name, text.strip(), getattr(defaults, name))
        elif not name.isupper():
            raise RequestError(
                "is unknown",
                field=f"config.pbtxt: parameters.{name}",
                remedy=f"Known are {', '.join(sorted(known))}",
            )
    return Settings(**given)


def _read(name: str, text: str, default: bool | int | None) -> bool | int | None:
    """A value of the default's type; "" is the default."""
    if not text:
        return default
    if isinstance(default, bool):
        if text.lower() in _TRUTH:
            return _TRUTH[text.lower()]
    elif text.isdecimal() and int(text) > 0:
        return int(text)
    raise RequestError(
        f"is {text!r}",
        field=f"config.pbtxt: parameters.{name}",
        remedy="Give true or false" if isinstance(default, bool) else "Give a number from 1 on",
    )


def _written(value: bool | int | None) -> str:
    if value is None:
        return ""
    return str(value).lower()

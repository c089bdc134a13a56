"""How a model is served: the parameters of its config.pbtxt, which an operator may edit."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trtc.protos.errors import RequestError

_TRUTH = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Settings:
    """Names are those of tensorrtllm_backend where it has the same parameter."""

    exclude_input_in_output: bool = True
    """Of requests that do not say: leave the prompt out of the answer. (There the default is false,
    and all its examples set true.)"""
    enable_kv_cache_reuse: bool = True
    """Compute a prompt's known beginning once."""
    cancellation_check_period_ms: int = 100
    """How long a request may run on after its client has gone."""
    max_queue: int = 1024
    """Requests that may wait; one more is refused."""
    num_threads: int | None = None
    """CPU threads; None: the usable cores."""
    kv_bytes: int | None = None
    """Memory of the KV pool; None: enough for a full batch, if there is room."""
    kv_cache_host_memory_bytes: int | None = None
    """Of the host's memory, for cached prefixes that the pool has no room for; None: they are
    lost."""

    def as_parameters(self) -> dict[str, str]:
        """ "" stands for None."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: _written(value) for name, value in values.items()}


def read_settings(parameters: Mapping[str, str]) -> Settings:
    """Settings out of the parameters of a model; those of Triton itself are in capitals.

    Raises:
        RequestError: a parameter that is unknown or has no such value; names it.
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

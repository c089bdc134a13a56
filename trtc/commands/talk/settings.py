"""What `/set` sets: options of requests, read from a line of text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trtc.protos.errors import RequestError
from trtc.protos.sampling import SAMPLING_PARAMETERS, Range

_NO_LIMIT = Range(1, 2**31 - 1)
_SEEDS = Range(0, 2**63 - 1)


@dataclass(frozen=True)
class Setting:
    kind: Callable[[str], Any]
    values: Range
    meaning: str


SETTINGS: Mapping[str, Setting] = {
    **{one.name: Setting(one.kind, one.values, one.meaning) for one in SAMPLING_PARAMETERS},
    "max_tokens": Setting(int, _NO_LIMIT, "new tokens of an answer"),
    "seed": Setting(int, _SEEDS, "same seed, same tokens"),
}
DEFAULT = "default"


def read_setting(name: str, text: str) -> Any:
    """The value of a setting.

    Raises:
        RequestError: there is no such setting, or it cannot have this value.
    """
    setting = SETTINGS.get(name)
    if setting is None:
        raise RequestError(
            "there is no such setting", field=name, remedy=f"Choose one of: {', '.join(SETTINGS)}"
        )
    try:
        value = setting.kind(text)
    except ValueError:
        value = None
    if value is None or value not in setting.values:
        kind = "a whole number" if setting.kind is int else "a number"
        raise RequestError(
            f"is {text[:40]!r}", field=name, remedy=f"Give {kind} {setting.values}, or {DEFAULT}"
        )
    return value

"""Numbers of bytes as people write them: 5GB, 4.5 GiB, 800000000."""

import re

from trtc.protos.errors import RequestError

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{unit}b": 1000 ** (power + 1) for power, unit in enumerate("kmgt")},
    **{f"{unit}ib": 1024 ** (power + 1) for power, unit in enumerate("kmgt")},
}
_NUMBER = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,9})?) ?([a-zA-Z]*)")
_MOST = 1 << 50


def parse_bytes(text: str, field: str) -> int:
    """The bytes that a number with a unit is: kB, MB, GB and TB are powers of 1000, KiB, MiB, GiB
    and TiB of 1024, in any case. Parts of a byte are dropped.

    Raises:
        RequestError: not of that form, zero, or more than a PiB.
    """
    match = _NUMBER.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if not 0 < size <= _MOST:
        raise RequestError(
            f"is {text!r}", field=field, remedy="Give a number of bytes, as in 5GB, 800MB or 4.5GiB"
        )
    return size

"""What the system says of one of this process's mappings."""

import re
from pathlib import Path

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def mapping_entry(address: int) -> str:
    """The entry of /proc/self/smaps whose range holds an address."""
    text = Path("/proc/self/smaps").read_text()
    for entry in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.M)[1:]:
        low, high = (int(bound, 16) for bound in entry.split(" ", 1)[0].split("-"))
        if low <= address < high:
            return entry
    raise AssertionError(f"nothing is mapped at {address:#x}")


def kilobytes(entry: str, field: str) -> int:
    found = re.search(rf"^{field}: +(\d+) kB$", entry, flags=re.M)
    assert found, f"{field} is not in {entry}"
    return int(found[1])

"""What /proc says of processes."""

import os
from contextlib import suppress
from pathlib import Path


def children(parent: int | None = None, running: str = "") -> set[int]:
    """Children of a process, this one by default; also those that ended and nobody waited for.

    Args:
        running: part of their command line; those that ended have none.
    """
    found = set()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) != (parent or os.getpid()):
                    continue
                if running in (path / "cmdline").read_text():
                    found.add(int(path.name))
    return found


def resident_bytes(pid: int | None = None) -> int:
    """Resident memory of a process, this one by default."""
    pages = int(Path(f"/proc/{pid or os.getpid()}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

"""CPU cores and memory that this process may use, with the limits of containers."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


def num_usable_cores(cpus: Path = _CPUS, cgroup: Path = _CGROUP) -> int:
    """Physical cores that this process may run on, at most its CPU quota; at least 1.

    A second thread on a core does not speed up kernels that are bound by memory, and threads beyond
    a container's quota make barriers wait for the next scheduling period.
    """
    return max(1, min(len(usable_cores(cpus)), _cpu_quota(cgroup)))


def usable_cores(cpus: Path = _CPUS) -> tuple[int, ...]:
    """The first logical CPU of each physical core that this process may run on."""
    first: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        first.setdefault(_first_sibling(cpus, cpu), cpu)
    return tuple(first.values())


def num_usable_cpus() -> int:
    """Logical CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Bytes that can be allocated without swapping, at most the rest of the container's limit. The
    page cache does not count as used."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit.isdigit() and used.isdigit():
        free = min(free, int(limit) - int(used) + _cached_bytes(cgroup))
    return max(0, free)


def resident_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Resident bytes of this process, without mapped files."""
    for line in _read(status).splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _cached_bytes(cgroup: Path) -> int:
    """Reclaimable bytes of the container's memory use."""
    fields = (line.split() for line in _read(cgroup / "memory.stat").splitlines())
    return sum(int(one[1]) for one in fields if one[0] in ("active_file", "inactive_file"))


def _first_sibling(cpus: Path, cpu: int) -> str:
    siblings = _read(cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list")
    return siblings or str(cpu)


def _cpu_quota(cgroup: Path) -> int:
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        return max(1, int(quota) // int(period))
    return os.cpu_count() or 1


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""

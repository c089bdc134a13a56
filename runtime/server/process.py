"""System settings of the server process; applied once, at its start.

Without these, many connections end in "too many open files" if the shell's soft limit is 1024, and
memory that threads free stays in their malloc arenas: after a load peak a process keeps twice as
much memory as one with two arenas.
"""

import ctypes
import os
import resource
import sys

MAX_OPEN_FILES = 1 << 16
MAX_ARENAS = 2
_M_ARENA_MAX = -8
"""Constant of glibc's malloc.h."""


def prepare_process() -> None:
    """Raise the soft limit of open files to the hard limit, limit the number of malloc's arenas,
    and keep `tokenizers` from starting a thread for each CPU, unless the user has set these."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:  # musl has none
            mallopt(_M_ARENA_MAX, MAX_ARENAS)

"""Low priority for threads that should not compete with kernels for the cores."""

import contextlib
import os
import threading

_NICENESS = 10


def lower_priority() -> None:
    """Lower the scheduling priority of the calling thread; on Linux, of no other.

    A lower priority of the process is kept, because only root may raise it.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < _NICENESS:
        os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)

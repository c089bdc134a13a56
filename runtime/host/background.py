"""Threads whose work can wait for kernels to have the cores."""

import os
import threading

_NICENESS = 10


def lower_priority() -> None:
    """Lower the scheduling priority of the calling thread; on Linux, of no other."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)

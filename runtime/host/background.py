"""Threads whose work can wait for kernels to have the cores."""

import os
import threading

_NICENESS = 10


def make_way() -> None:
    """Let other threads go before the calling one. On Linux both calls are about it alone."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)

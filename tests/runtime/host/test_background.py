"""Threads of lower priority, also in a process that was started with a low one."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from trtc.runtime.host import background


def niceness_after() -> int:
    with ThreadPoolExecutor(1, initializer=background.lower_priority) as pool:
        return pool.submit(
            lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        ).result()


@pytest.mark.parametrize(("given", "expected"), [(0, 10), (10, 10), (15, 15)])
def test_a_thread_gets_a_lower_priority_and_never_a_higher_one(given: int, expected: int) -> None:
    code = (
        "import os; from tests.runtime.host.test_background import niceness_after;"
        f"os.setpriority(os.PRIO_PROCESS, 0, max({given}, os.getpriority(os.PRIO_PROCESS, 0)));"
        "print(os.getpriority(os.PRIO_PROCESS, 0), niceness_after())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, told.stdout.split())
    assert before >= given
    assert after == max(before, expected)


def test_a_process_that_may_not_choose_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert niceness_after() >= 10

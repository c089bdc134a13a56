"""Processes that call hooks: in order, each call for a bounded time, and none left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.aio import asynchronous
from trtc.protos.errors import ForbiddenError, HookError, RequestError
from trtc.runtime.hooks.calls import Edit, Edited, HookCalls, _add_edits
from trtc.runtime.hooks.child import take_frames
from trtc.runtime.hooks.config import HooksConfig
from trtc.runtime.hooks.contract import LogitsEdit, NewOutput, RequestInfo, Stop
from trtc.runtime.hooks.process import HookProcess

SETS = "tests.support.hook_sets"
OUTPUT = NewOutput(0, "some text", (1, 2))


@asynccontextmanager
async def calls_of(name: str, **options: Any) -> AsyncIterator[HookCalls]:
    calls = HookCalls(HooksConfig(f"{SETS}:{name}", **options))
    await calls.start()
    try:
        yield calls
    finally:
        await calls.close()


async def on_output(calls: HookCalls, request_id: str, lane: int = 0) -> Any:
    info = RequestInfo(request_id, "echo")
    return await calls.call(lane, "on_output", request_id, info, OUTPUT)


async def edited(calls: HookCalls, request_ids: Sequence[str], num_output: int = 2) -> list[Any]:
    """What logits_processor gives for each, all asked about at once by another thread."""
    edits, answers = edits_of(request_ids, num_output)
    await asyncio.to_thread(calls.begin_edits, edits, settle)
    return await asyncio.gather(*answers)


def edits_of(
    request_ids: Sequence[str], num_output: int = 2
) -> tuple[list[Edit], list["asyncio.Future[Any]"]]:
    """Calls of logits_processor, which any thread may answer, and what they are answered."""
    answers = [asyncio.get_running_loop().create_future() for _ in request_ids]
    edits = [
        Edit(0, RequestInfo(one, "echo"), [1] * num_output, answer)
        for one, answer in zip(request_ids, answers, strict=True)
    ]
    return edits, answers


def settle(ended: Sequence[Edited]) -> None:
    for edit, given in ended:
        edit.asker.get_loop().call_soon_threadsafe(edit.asker.set_result, given)


@asynchronous
async def test_only_methods_that_the_class_has_are_called() -> None:
    async with calls_of("Chooser") as calls:
        assert calls.methods == {"logits_processor"}
        assert await on_output(calls, "hang-on_output") is None


@asynchronous
async def test_answers_are_those_of_their_calls() -> None:
    async with calls_of("Editor", num_processes=3) as calls:
        names = ["plain", "redact", "stop"] * 100
        lanes = [calls.lane() for _ in names]
        assert set(lanes) == {0, 1, 2}
        answers = await asyncio.gather(
            *(on_output(calls, name, lane) for name, lane in zip(names, lanes, strict=True))
        )
    assert answers == [None, "*" * len(OUTPUT.text), Stop("[stopped]")] * 100


@pytest.mark.parametrize(
    ("fault", "problem"), [("hang", "took longer than 0.5 s"), ("exit", "ended its process")]
)
@asynchronous
async def test_a_call_that_ends_its_process_fails_alone(fault: str, problem: str) -> None:
    async with calls_of("Told", timeout_s=0.5, num_processes=1) as calls:
        before = calls.pids
        names = ["a", "b", f"{fault}-on_output", "c", f"{fault}-on_output-2", "d", "e"]
        answers = await asyncio.gather(
            *(on_output(calls, name) for name in names), return_exceptions=True
        )
        assert [one for one in answers if one is None] == [None] * 5
        for at in (2, 4):
            assert isinstance(answers[at], HookError)
            assert str(answers[at]).startswith(f"the server's hook on_output {problem}. ")
        (now,) = calls.pids
        assert [now] != before
        with pytest.raises(ProcessLookupError):  # it is gone, and no zombie
            for _ in range(500):
                os.kill(before[0], 0)
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("fault", "problem"), [("hang", "took longer than 0.5 s"), ("exit", "ended its process")]
)
@asynchronous
async def test_an_edit_that_ends_its_process_fails_alone(fault: str, problem: str) -> None:
    """Also of those whose answers had not been sent."""
    async with calls_of("Told", timeout_s=0.5, num_processes=1) as calls:
        names = [str(at) for at in range(64)]
        names[20] = f"{fault}-logits_processor"
        names[40] = f"{fault}-logits_processor-2"
        names[50] = "raise-logits_processor"
        beside = [asyncio.create_task(on_output(calls, "x")) for _ in range(3)]
        answers = await edited(calls, names)
        for at, answer in enumerate(answers):
            if at in (20, 40, 50):
                assert isinstance(answer, HookError)
                said = "failed" if at == 50 else problem
                assert str(answer).startswith(f"the server's hook logits_processor {said}. ")
            else:
                assert answer is None
        assert await asyncio.gather(*beside) == [None] * 3


@asynchronous
async def test_the_time_of_an_edit_begins_when_those_before_it_have_ended() -> None:
    async with calls_of("Told", timeout_s=0.5, num_processes=1) as calls:
        names = [f"slow-logits_processor-{at}" for at in range(16)]  # 0.8 s together
        assert await edited(calls, names) == [None] * 16


@asynchronous
async def test_edits_are_answered_while_the_loop_of_the_streams_is_busy() -> None:
    """A step waits for them, and not for what the loop does."""
    answers: list[Any] = []
    answered = threading.Event()

    def note(ended: Sequence[Edited]) -> None:
        answers.extend(given for _, given in ended)
        if len(answers) == 64:
            answered.set()

    async with calls_of("Told", num_processes=1) as calls:
        outputs = [asyncio.create_task(on_output(calls, "x")) for _ in range(64)]
        await asyncio.sleep(0)
        info = RequestInfo("x", "echo")
        calls.begin_edits([Edit(0, info, [1], None) for _ in range(64)], note)
        assert answered.wait(30)  # in this loop's thread, which does nothing else meanwhile
        assert answers == [None] * 64
        assert not any(one.done() for one in outputs)
        assert await asyncio.gather(*outputs) == [None] * 64


@asynchronous
async def test_edits_are_those_of_their_calls_however_large() -> None:
    async with calls_of("Chooser", num_processes=1) as calls:
        for num_output in (0, 100_000, 3):  # more than is read at once
            found = await edited(calls, ["x"] * 9, num_output)
            assert found == [LogitsEdit(list(range(40, 44)), {40 + num_output % 4: 50.0})] * 9


@asynchronous
async def test_calls_of_one_turn_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    send = HookProcess.send

    def noted(self: HookProcess, frames: bytes) -> None:
        sent.extend(msgspec.msgpack.decode(one) for one in take_frames(bytearray(frames)))
        send(self, frames)

    async with calls_of("Told", num_processes=1) as calls:
        monkeypatch.setattr(HookProcess, "send", noted)
        assert await asyncio.gather(*(on_output(calls, "x") for _ in range(64))) == [None] * 64
        assert await edited(calls, ["x"] * 64) == [None] * 64
    calls_of_methods = [one for one in sent if isinstance(one, list)]  # else a class's name
    assert [one[0] for one in calls_of_methods] == ["on_output", "logits_processor"]


@asynchronous
async def test_an_answer_does_not_wait_for_slow_calls_behind_it() -> None:
    async with calls_of("Told", num_processes=1) as calls:
        asked = [asyncio.create_task(on_output(calls, f"slow-on_output-{at}")) for at in range(6)]
        assert await asked[0] is None
        assert not asked[-1].done()
        assert await asyncio.gather(*asked) == [None] * 6


@asynchronous
async def test_a_new_process_is_not_sent_what_nobody_waits_for() -> None:
    async with calls_of("Told", timeout_s=0.5, num_processes=1) as calls:
        names = ["hang-on_output", "hang-on_output-2", "x"]
        first, left, last = (asyncio.create_task(on_output(calls, one)) for one in names)
        await asyncio.sleep(0.1)
        left.cancel()
        with pytest.raises(HookError, match="took longer"):
            await first
        begin = time.monotonic()
        assert await last is None
        assert time.monotonic() - begin < 0.5, "another timeout"


@asynchronous
async def test_answers_may_be_larger_than_a_socket_holds() -> None:
    large = NewOutput(0, "x" * 3_000_000, ())
    async with calls_of("Editor", num_processes=1) as calls:
        info = RequestInfo("redact", "echo")
        asked = [calls.call(0, "on_output", "redact", info, large) for _ in range(3)]
        assert await asyncio.gather(*asked) == ["*" * 3_000_000] * 3


@asynchronous
async def test_answers_before_the_end_of_a_process_are_read() -> None:
    """Whatever else is on its way to it then."""
    large = NewOutput(0, "x" * 200_000, ())

    async def call(calls: HookCalls, name: str) -> Any:
        return await calls.call(0, "on_output", name, RequestInfo(name, "echo"), large)

    async with calls_of("Told", num_processes=1) as calls:
        names = ["exit-on_output" if at % 7 == 3 else "x" for at in range(21)]
        answers = await asyncio.gather(*(call(calls, one) for one in names), return_exceptions=True)
        assert [isinstance(one, HookError) for one in answers] == [one != "x" for one in names]


@asynchronous
async def test_the_time_of_a_call_begins_when_those_before_it_have_ended() -> None:
    async with calls_of("Told", timeout_s=0.5, num_processes=1) as calls:
        names = [f"slow-on_output-{at}" for at in range(16)]  # 0.8 s together
        assert await asyncio.gather(*(on_output(calls, name) for name in names)) == [None] * 16


@asynchronous
async def test_what_a_hook_raises_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with calls_of("Told", num_processes=1) as calls:
        with pytest.raises(HookError, match=r"^the server's hook on_output failed\. ") as failed:
            await on_output(calls, "raise-on_output")
        assert "secret" not in str(failed.value)
        assert "a secret of the operator's" in caplog.text
        with pytest.raises(ForbiddenError, match=r"^not on a Monday$"):
            await on_output(calls, "refuse-on_output")
        assert await on_output(calls, "x") is None


@asynchronous
async def test_results_that_the_contract_does_not_have_are_failures() -> None:
    async with calls_of("Wrong", num_processes=1) as calls:
        with pytest.raises(HookError, match="on_output gave a wrong result"):
            await on_output(calls, "number")
        with pytest.raises(HookError, match="on_output failed"):
            await on_output(calls, "object")


@asynchronous
async def test_halves_of_surrogate_pairs_do_not_fail_a_call() -> None:
    async with calls_of("Editor", num_processes=1) as calls:
        info = RequestInfo("redact", "echo")
        told = await calls.call(0, "on_output", "redact", info, NewOutput(0, "a\ud800b", ()))
        assert told == "***"


@asynchronous
async def test_a_process_that_ended_while_idle_is_replaced() -> None:
    async with calls_of("Told", num_processes=1) as calls:
        for _ in range(2):
            os.kill(calls.pids[0], signal.SIGKILL)
            while calls.pids:
                await asyncio.sleep(0.01)
            assert await edited(calls, ["x"] * 3) == [None] * 3
            assert await on_output(calls, "x") is None


@asynchronous
async def test_closing_fails_what_runs() -> None:
    async with calls_of("Told", num_processes=1) as calls:
        running = asyncio.create_task(on_output(calls, "hang-on_output"))
        await asyncio.sleep(0.05)
        edit = asyncio.create_task(edited(calls, ["hang-logits_processor"]))
        await asyncio.sleep(0.05)
        await calls.close()
        with pytest.raises(HookError, match="did not end before the server did"):
            await running
        (answer,) = await edit
        assert "did not end before the server did" in str(answer)
        with pytest.raises(HookError, match="the server ends"):
            await on_output(calls, "x")
        (answer,) = await edited(calls, ["x"])
        assert "the server ends" in str(answer)


def test_hooks_that_have_ended_answer_no_edits() -> None:
    calls = HookCalls(HooksConfig(f"{SETS}:Told", num_processes=1))

    async def use() -> None:
        await calls.start()
        await calls.close()

    asyncio.run(use())
    answers: list[Edited] = []
    calls.begin_edits([Edit(0, RequestInfo("x", "echo"), [], None)], answers.extend)
    assert [type(one) for _, one in answers] == [HookError]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere:Hooks", "No module named 'nowhere'"),
        (f"{SETS}:Nobody", "has no attribute 'Nobody'"),
        (f"{SETS}:Without", "has none of on_request, on_prompt, logits_processor, on_output"),
        (f"{SETS}:Asynchronous", "on_output is a coroutine"),
        (f"{SETS}:Unmade", "no database"),
        ("os:abort", "ended its process when it was made"),
    ],
)
@asynchronous
async def test_a_class_that_cannot_be_used_is_refused_by_name(name: str, problem: str) -> None:
    calls = HookCalls(HooksConfig(name))
    with pytest.raises(RequestError, match=rf"(?s)^--hooks: {name} .*{problem}"):
        await calls.start()
    await calls.close()


def test_a_hook_that_hangs_ends_with_a_server_that_is_killed() -> None:
    code = (
        "import asyncio, os\n"
        "from tests.runtime.hooks.test_calls import calls_of, on_output\n"
        "async def main():\n"
        "    async with calls_of('Told', timeout_s=60.0, num_processes=1) as calls:\n"
        "        asyncio.create_task(on_output(calls, 'hang-on_output'))\n"
        "        await asyncio.sleep(0.1)\n"
        "        print(calls.pids[0], flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert server.stdout is not None
    with server, server.stdout:
        pid = int(server.stdout.readline())
        os.kill(pid, 0)
        server.kill()
        server.wait()
    for _ in range(1000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":  # its new parent has not looked yet
            return
        subprocess.run(["sleep", "0.01"], check=True)
    raise AssertionError("it goes on")


@asynchronous
async def test_calls_that_were_not_sent_are_told_from_those_that_were() -> None:
    """The process ends in the turn of the loop in which they are made."""
    async with calls_of("Told", num_processes=1) as calls:
        assert await edited(calls, ["x"] * 5) == [None] * 5
        lane = calls._lanes._lanes[0]
        edits, answers = edits_of([str(at) for at in range(3)])

        def add_and_end() -> None:
            _add_edits(calls._lanes, edits, settle)
            lane._replace("ended its process")

        assert calls._thread is not None
        calls._thread.loop.call_soon_threadsafe(add_and_end)
        first, *others = await asyncio.gather(*answers)
        assert isinstance(first, HookError)
        assert others == [None] * 2

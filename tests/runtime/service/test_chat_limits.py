"""A chat whose template never ends costs its own client an error, and nobody else anything."""

import json
import shutil
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.aio import asynchronous
from tests.support.processes import children, resident_bytes
from tests.support.servers import TOKENIZER, echo_process
from trtc import Client
from trtc.protos.errors import InvalidRequestError, QueueFullError, TrtcError
from trtc.runtime.service.fair_turns import FairTurns

TEMPLATE = (
    "{% if messages[0].content == 'hang' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}{% endif %}"
    "{{ messages[0].content }}"
)
HANG = [{"role": "user", "content": "hang"}]
FINE = [{"role": "user", "content": "import os"}]
LONG_TEXT = "import os\n" * 300
"""Is tokenised in a thread."""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    shutil.copy(TOKENIZER / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return tmp_path


def test_others_are_served_while_chats_hang_and_sigterm_ends_the_server(tokenizer: Path) -> None:
    with (
        echo_process("--tokenizer", str(tokenizer), "--drain-timeout", "1") as server,
        Client(server.address) as attacker,
        Client(server.address) as other,
        ThreadPoolExecutor(8) as pool,
    ):
        pid = server.process.pid
        other.chat(FINE, max_tokens=4).result()
        before = resident_bytes(pid)

        def hang() -> str:
            try:
                attacker.chat(HANG, max_tokens=1).result()
            except TrtcError as error:
                return str(error)
            return "answered"

        hanging: list[Future[str]] = [pool.submit(hang) for _ in range(3)]
        began = time.monotonic()
        while not all(one.done() for one in hanging):
            other.generate(LONG_TEXT, max_tokens=2).result()
            assert time.monotonic() - began < 120
            time.sleep(0.05)
        ends = [one.result() for one in hanging]
        assert any("takes more than 2 seconds" in end for end in ends)
        assert all("takes more than" in end or "were busy" in end for end in ends)
        assert other.chat(FINE, max_tokens=4).result().usage.completion_tokens == 4
        assert resident_bytes(pid) - before < 64 << 20

        hanging = [pool.submit(hang) for _ in range(3)]
        deadline = time.monotonic() + 30
        while not children(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        left = children(pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=20) == 0
        assert all(one.result(timeout=20) != "answered" for one in hanging)
        assert not [child for child in left if Path(f"/proc/{child}").exists()]


def test_a_refusal_is_the_requests_error(tokenizer: Path) -> None:
    template = "{{ raise_exception('no ' + messages[0].role) }}"
    (tokenizer / "chat_template.jinja").write_text(template)
    with (
        echo_process("--tokenizer", str(tokenizer)) as server,
        Client(server.address) as client,
        pytest.raises(InvalidRequestError, match=r"refuses them \(no user\)"),
    ):
        client.chat(FINE, max_tokens=1).result()


@asynchronous
async def test_clients_take_turns_and_none_holds_everything() -> None:
    import asyncio

    turns = FairTurns(capacity=2, per_client=1, wait_s=60, name="these")
    order: list[str] = []
    free = asyncio.Event()

    async def ask(client: str) -> None:
        async with turns.turn(client):
            order.append(client)
            await free.wait()
        order.append(f"-{client}")

    greedy = [asyncio.create_task(ask("greedy")) for _ in range(3)]
    await asyncio.sleep(0)
    assert order == ["greedy"]
    others = [asyncio.create_task(ask(name)) for name in ("second", "third")]
    await asyncio.sleep(0.01)
    assert order == ["greedy", "second"]
    greedy[1].cancel()
    free.set()
    done = await asyncio.gather(*greedy, *others, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in done].count(True) == 1
    starts = [name for name in order if not name.startswith("-")]
    assert sorted(starts) == ["greedy", "greedy", "second", "third"]
    async with turns.turn("greedy"), turns.turn("second"):
        pass


@asynchronous
async def test_a_turn_is_not_waited_for_without_end() -> None:
    turns = FairTurns(capacity=1, per_client=1, wait_s=0.02, name="these processes")
    async with turns.turn("first"):
        with pytest.raises(QueueFullError, match="these processes were busy"):
            async with turns.turn("second"):
                raise AssertionError("a turn that was not free")
    async with turns.turn("second"):
        with pytest.raises(TimeoutError):
            raise TimeoutError

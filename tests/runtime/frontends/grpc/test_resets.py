"""How long a call that was cancelled unread keeps its stream."""

import asyncio
from dataclasses import replace

import pytest

from tests.support.aio import asynchronous, eventually
from tests.support.http2 import RawClient, cancel_stream, open_stream, request_headers
from tests.support.servers import CONFIG, echo_server
from trtc.runtime.frontends.grpc import resets
from trtc.runtime.frontends.grpc.frontend import GrpcFrontend
from trtc.runtime.frontends.grpc.resets import BURST, MAX_HOLD_S, RESETS_PER_S, Resets


def test_a_burst_is_free_and_the_others_end_at_the_rate() -> None:
    rates = Resets()
    assert max(rates.count("a", 0.0) for _ in range(BURST)) < 1e-6
    held = [rates.count("a", 0.0) for _ in range(100)]
    assert held == pytest.approx([number / RESETS_PER_S for number in range(1, 101)])
    assert rates.count("b", 0.0) < 0, "another host has its own burst"
    assert rates.count("a", 60.0) < 0, "what was cancelled long ago is forgotten"


def test_nothing_is_held_for_long() -> None:
    rates = Resets()
    assert max(rates.count("a", 0.0) for _ in range(10_000)) == pytest.approx(MAX_HOLD_S)


def test_hosts_that_have_gone_leave_nothing_behind() -> None:
    rates = Resets()
    for second in range(3000):
        rates.count(f"{second}", float(second))
    assert len(rates._due) == 1


def hold_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is let go because time passes, which it does where a machine is busy."""
    monkeypatch.setattr(resets, "RESETS_PER_S", 1e-6)
    monkeypatch.setattr(resets, "MAX_HOLD_S", 3600.0)


@asynchronous
async def test_as_many_wait_as_may_and_closing_lets_them_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resets, "MAX_HELD", 50)
    hold_for_good(monkeypatch)
    rates = Resets()
    tasks = [asyncio.create_task(rates.hold("a")) for _ in range(BURST + 80)]
    await eventually(lambda: sum(task.done() for task in tasks) == BURST + 30, "others have ended")
    assert rates.num_held == 50
    rates.close()
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks, rates.hold("a"))
    assert rates.num_held == 0


@asynchronous
async def test_calls_cancelled_unread_are_held_and_the_server_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hold_for_good(monkeypatch)
    monkeypatch.setattr(resets, "BURST", 0)
    headers = request_headers("/trtc.v1.Inference/Generate")
    calls = range(1, 200, 2)
    config = replace(CONFIG, drain_timeout_s=3600.0)
    async with echo_server(config=config) as server:
        client = await asyncio.to_thread(RawClient, server.address)
        frontend = server.server.frontends["grpc"]
        assert isinstance(frontend, GrpcFrontend)
        rates = frontend._intake._resets
        opened = b"".join(open_stream(one, headers) + cancel_stream(one) for one in calls)
        await asyncio.to_thread(client.send, opened)
        await eventually(lambda: rates.num_held > 0, "some are held", 120)
    assert rates.num_held == 0, "an hour before they were due"
    client.close()

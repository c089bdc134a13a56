"""Which engine serves a name: states, leases, what requests are told."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.aio import asynchronous
from tests.support.servers import EchoEngine, open_echo
from trtc.protos.errors import UnavailableError, UnknownModelError
from trtc.runtime.engine.config import EngineConfig
from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.service.models import Model, Models, ModelState


@contextmanager
def engines(*names: str) -> Iterator[list[EngineHandle]]:
    opened = [open_echo(EchoEngine(), name, EngineConfig()) for name in names]
    try:
        yield opened
    finally:
        for one in opened:
            one.loop.stop()
            one.close()


def serving(engine: EngineHandle) -> Model:
    return Model(engine.name, ModelState.READY, engine=engine)


@asynchronous
async def test_a_model_is_known_before_it_is_open_and_serves_once_it_is() -> None:
    models = Models(["a"])
    assert models.why_not_ready() == {"a": "opening"}
    with pytest.raises(UnavailableError, match="engine a is not ready: opening"):
        models.engine("a")
    with pytest.raises(UnknownModelError, match="Choose one of: a"):
        models.engine("b")
    with engines("a") as (one,):
        models.put(serving(one))
        assert models.engine("a") is models.engine("") is one
        assert models.why_not_ready() == {}
        models.set_ready("a", "resting")
        with pytest.raises(UnavailableError, match="resting"):
            models.check_serves(one)


@asynchronous
async def test_a_name_may_be_left_out_where_one_model_is_wanted() -> None:
    models = Models()
    with pytest.raises(UnknownModelError, match="no engine is served"):
        models.engine("")
    with engines("a", "b") as (a, b):
        models.put(serving(a))
        models.put(Model("c", ModelState.UNAVAILABLE, "damaged", is_wanted=False))
        assert models.engine("") is a
        assert models.why_not_ready() == {}
        models.put(serving(b))
        with pytest.raises(UnknownModelError, match="several"):
            models.engine("")
        models.remove("a")
        assert models.engine("") is b


@asynchronous
async def test_an_engine_that_was_replaced_is_used_until_its_last_lease_ends() -> None:
    models = Models(["a"])
    with engines("a", "a") as (old, new):
        models.put(serving(old))
        with models.lease("a") as first:
            assert first is old
            models.put(serving(new))
            models.check_serves(old)  # whoever has it already may go on
            with models.lease("a") as second:
                assert second is new
            assert not await models.unused(old, 0.01)
            waiting = asyncio.create_task(models.unused(old, None))
            await asyncio.sleep(0)
            assert not waiting.done()
        assert await waiting
        assert await models.unused(new, 0)


@asynchronous
async def test_draining_is_not_undone() -> None:
    models = Models(["a"])
    told: list[dict[str, str]] = []
    models.on_change(lambda: told.append(models.why_not_ready()))
    with engines("a") as (one,):
        models.put(serving(one))
        models.drain()
        models.set_ready("a")
        assert told == [{"a": "opening"}, {}, {"a": "draining"}, {"a": "draining"}]
        with pytest.raises(UnavailableError, match="shutting down"):
            models.check_serves(one)

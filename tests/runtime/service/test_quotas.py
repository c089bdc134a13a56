"""Limits of tenants, by a clock that the test moves."""

from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.clock import Clock
from trtc.protos.errors import ForbiddenError, QueueFullError
from trtc.runtime.requests.principal import LOCAL, Principal, connection, tenant
from trtc.runtime.requests.tenant_limits import TenantLimits
from trtc.runtime.service.quotas import Quotas


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quotas(clock: Clock) -> Quotas:
    return Quotas(clock)


def alice(
    requests: int | None = None,
    tokens: int | None = None,
    streams: int | None = None,
    models: frozenset[str] | None = None,
) -> Principal:
    return tenant("alice", limits=TenantLimits(requests, tokens, streams, models=models))


def run(quotas: Quotas, principal: Principal, prompt: int = 1, completion: int = 0) -> None:
    """A generation from its beginning to its end, which takes no time."""
    with quotas.stream(principal, "m") as stream:
        stream.check_tokens(prompt)
        stream.pay(prompt)
        for _ in range(completion):
            stream.pay(1)


def refusal(quotas: Quotas, principal: Principal, prompt: int = 1) -> tuple[str, Any]:
    """The limit, and the seconds to wait."""
    with pytest.raises(QueueFullError) as caught:
        run(quotas, principal, prompt)
    assert caught.value.retry_after_s is not None
    return caught.value.limit, caught.value.retry_after_s


def test_requests_come_back_one_by_one(quotas: Quotas, clock: Clock) -> None:
    for _ in range(30):
        run(quotas, alice(requests=30))
    assert refusal(quotas, alice(requests=30)) == ("tenant_requests", pytest.approx(2.0))
    clock.now += 2.0
    run(quotas, alice(requests=30))
    assert refusal(quotas, alice(requests=30))[1] == pytest.approx(2.0)
    clock.now += 3600
    for _ in range(30):
        run(quotas, alice(requests=30))


def test_a_completion_is_paid_afterwards_and_waited_for_by_the_next(
    quotas: Quotas, clock: Clock
) -> None:
    limited = alice(tokens=600)
    run(quotas, limited, prompt=500, completion=400)  # 300 more than there were
    assert refusal(quotas, limited) == ("tenant_tokens", pytest.approx(30.1))
    clock.now += 30.1
    assert refusal(quotas, limited, prompt=601)[1] == pytest.approx(59.9)
    run(quotas, limited)


def test_a_prompt_larger_than_the_limit_waits_for_a_full_minute(
    quotas: Quotas, clock: Clock
) -> None:
    limited = alice(tokens=60)
    run(quotas, limited, prompt=30)
    assert refusal(quotas, limited, prompt=1000)[1] == pytest.approx(30.0)
    clock.now += 30.0
    run(quotas, limited, prompt=1000)
    assert refusal(quotas, limited)[1] == pytest.approx(941.0)


def test_streams_are_counted_while_they_are_open(quotas: Quotas) -> None:
    limited = alice(streams=2)
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(quotas.stream(limited, "m"))
        assert refusal(quotas, limited)[0] == "tenant_streams"
        quotas.take_request(limited, "m")  # generates nothing
        run(quotas, tenant("bob", limits=TenantLimits(max_streams=1)))
    run(quotas, limited)


def test_what_is_refused_is_not_counted(quotas: Quotas, clock: Clock) -> None:
    limited = alice(requests=1, streams=1)
    with quotas.stream(limited, "m"):
        for _ in range(10):
            assert refusal(quotas, limited)[0] == "tenant_streams"
    for _ in range(10):
        assert refusal(quotas, limited) == ("tenant_requests", pytest.approx(60.0))
    clock.now += 60.0
    run(quotas, limited)


def test_a_model_that_is_not_the_tenants_is_refused_and_costs_nothing(quotas: Quotas) -> None:
    limited = alice(requests=1, models=frozenset({"m"}))
    for _ in range(3):
        with pytest.raises(ForbiddenError, match="Choose one of: m"), quotas.stream(limited, "x"):
            pass
        with pytest.raises(ForbiddenError):
            quotas.take_request(limited, "x")
    run(quotas, limited)


def test_limits_that_change_count_from_then_on(quotas: Quotas, clock: Clock) -> None:
    run(quotas, alice(requests=1))
    assert refusal(quotas, alice(requests=1))[1] == pytest.approx(60.0)
    run(quotas, alice())
    assert refusal(quotas, alice(requests=120))[1] == pytest.approx(0.5)
    clock.now += 0.5
    run(quotas, alice(requests=120))


def test_clients_without_limits_are_not_kept(quotas: Quotas) -> None:
    for number in range(100):
        run(quotas, connection(f"a:{number}", "a"))
    run(quotas, LOCAL)
    run(quotas, tenant("bob"))
    assert not quotas._usage

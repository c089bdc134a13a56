import random

import pytest

from trtc.protos.errors import QueueFullError
from trtc.runtime.requests.principal import LOCAL, Principal, connection, tenant
from trtc.runtime.scheduling.shares import Place, Resource, Shares

GREEDY = connection("a:1", "a")
MODEST = connection("b:1", "b")


def shares(capacity: int) -> Shares:
    return Shares(Resource("queue", capacity, "waiting requests", "--max-queue"))


def fill(places: Shares, principal: Principal) -> list[Place]:
    """Take what there is for one principal."""
    taken = []
    while True:
        try:
            taken.append(places.take(principal))
        except QueueFullError:
            return taken


def test_one_client_takes_two_thirds_and_a_newcomer_finds_room() -> None:
    places = shares(1024)
    held = fill(places, GREEDY)
    assert len(held) == 683
    with pytest.raises(QueueFullError, match="share of 683 waiting requests while 341 of 1024"):
        places.take(GREEDY)
    assert len(fill(places, MODEST)) == 228
    assert len(fill(places, connection("c:1", "c"))) == 76


def test_the_clients_of_one_host_leave_room_for_other_hosts() -> None:
    places = shares(1024)
    for port in range(100):
        fill(places, connection(f"a:{port}", "a"))
    assert places.num_taken == 911
    with pytest.raises(QueueFullError, match="this client's host has its share of 911"):
        places.take(connection("a:200", "a"))
    assert len(fill(places, MODEST)) == 76


def test_a_tenant_counts_once_wherever_it_connects_from() -> None:
    places = shares(90)
    assert len(fill(places, tenant("CN=a"))) == 60
    assert len(fill(places, tenant("CN=a"))) == 0


def test_code_of_this_process_has_no_share() -> None:
    places = shares(10)
    assert len(fill(places, LOCAL)) == 10
    with pytest.raises(QueueFullError, match="limit of 10 waiting requests"):
        places.take(LOCAL)


def test_places_that_were_freed_are_free_once() -> None:
    places = shares(3)
    held = fill(places, GREEDY)
    for place in [*held, *held]:
        place.free()
    assert places.num_taken == 0
    assert not places._clients
    assert not places._hosts


@pytest.mark.parametrize("seed", range(3))
def test_whoever_holds_nothing_finds_a_place(seed: int) -> None:
    """Whatever up to twenty clients of seven hosts take and free, in any order."""
    rng = random.Random(seed)
    places = shares(rng.choice((200, 500, 1024)))
    held: list[Place] = []
    for _ in range(3_000):
        number = rng.randrange(20)
        if rng.random() < 0.7:
            held += fill(places, connection(f"{number % 7}:{number}", str(number % 7)))[:50]
        for _ in range(rng.randrange(20)):
            if held:
                held.pop(rng.randrange(len(held))).free()
        places.take(connection("new:1", "new")).free()

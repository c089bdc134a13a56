"""Which waiting sequence is admitted next.

    hosts ──► clients of a host ──► a client's sequences, by `Sequence.order`
        (fair order)        (fair order)

Fair order, among hosts and among the clients of one:

1. overdue ones, which have waited for `overdue_s` without an admission, the longest waiting first;
2. then by the highest priority of their waiting sequences;
3. then by lanes held divided by weight, fewest first, so that those that wait come to hold lanes in
   proportion to their weights;
4. then by start-time fair queueing (Goyal et al., SIGCOMM 1996), the smallest tag first. Each
   admission adds its tokens, divided by the weight, to the tag, and a new client starts at the tag
   that was admitted last.

So a new client waits for a lane and not behind the whole queue of another client. Each client is
admitted in bounded time, whatever the priorities of the others: once overdue, it waits only for
those that have been overdue for longer. A tenant counts as a host, with the weight of its limits;
every other host and every client within a host has weight 1.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from trtc.protos.errors import InvariantError
from trtc.runtime.requests.principal import Principal
from trtc.runtime.scheduling.sequence import Sequence

Key = tuple[bool, float, float, float, int]

EXPECTED_OUTPUT = 64
"""New tokens that an admission is charged for in advance, at most. Longer outputs count by the lane
that they hold."""
MAX_IDLE_TAGS = 1024
"""The most clients without requests whose last tags are kept."""

_by_order = attrgetter("order")


def _cost(sequence: Sequence) -> int:
    """Tokens that an admission is charged for; 0 after a preemption."""
    if sequence.cached_prompt_tokens is not None:
        return 0
    known = len(sequence.token_ids)
    return known + sequence.num_samples * min(sequence.max_tokens - known, EXPECTED_OUTPUT)


class _Node:
    """A client, or a host with its clients: its waiting sequences and the service it has had."""

    __slots__ = (
        "group",
        "is_overdue",
        "key",
        "lanes",
        "members",
        "name",
        "num_skipped",
        "number",
        "since",
        "tag",
        "waiting",
        "waiting_of",
        "weight",
    )

    def __init__(self, name: str, number: int, group: "_Group", tag: float) -> None:
        self.name = name
        self.number = number
        """Order of creation: breaks ties."""
        self.group = group
        self.tag = tag
        self.weight = 1.0
        self.lanes = 0
        self.waiting_of: dict[int, int] = {}
        """priority -> number of waiting sequences; no zeros."""
        self.since = 0.0
        """Time of the last admission, or when it began to wait after that."""
        self.is_overdue = False
        self.key: Key | None = None
        """Its key in the group's order; None: nothing waits."""
        self.members: _Group | None = None
        """Clients of a host; None: this is a client."""
        self.waiting: list[Sequence] = []
        """Waiting sequences of a client, in order."""
        self.num_skipped = 0
        """In a forecast: sequences of `waiting` that it has admitted already."""

    def place(self) -> Key:
        if self.is_overdue:
            return (False, self.since, 0, 0.0, self.number)
        return (True, -max(self.waiting_of), self.load, self.tag, self.number)

    @property
    def load(self) -> float:
        """Lanes held, divided by the weight."""
        return self.lanes / self.weight

    def admit(self, sequence: Sequence) -> None:
        """Count an admission."""
        self.count_waiting(sequence.request.priority, -1)
        self.lanes += sequence.num_samples
        self.tag += _cost(sequence) / self.weight
        self.is_overdue = False

    def count_waiting(self, priority: int, change: int) -> None:
        number = self.waiting_of.get(priority, 0) + change
        if number:
            self.waiting_of[priority] = number
        else:
            del self.waiting_of[priority]

    def copy(self) -> "_Node":
        """A copy that a forecast changes."""
        copy = _Node(self.name, self.number, self.group, self.tag)
        copy.weight, copy.lanes, copy.waiting_of = self.weight, self.lanes, dict(self.waiting_of)
        copy.members, copy.waiting = self.members, self.waiting
        return copy


class _Group:
    """Nodes in fair order."""

    def __init__(self, patient: dict[_Node, None]) -> None:
        self.nodes: dict[str, _Node] = {}
        """Nodes with waiting or running sequences, by name."""
        self.order: list[tuple[Key, _Node]] = []
        """Nodes with waiting sequences, sorted by key."""
        self.patient = patient
        """Nodes with waiting sequences that are not overdue, the longest waiting first."""
        self._virtual_time = 0.0
        """The largest tag admitted so far."""
        self._idle_tags: dict[str, float] = {}
        """Tags beyond the virtual time of removed nodes, so that a client that comes back is not
        treated as new."""
        self._num_made = 0

    def node(self, name: str) -> _Node:
        """The node called `name`; created if there is none."""
        node = self.nodes.get(name)
        if node is None:
            self._num_made += 1
            tag = max(self._virtual_time, self._idle_tags.pop(name, 0.0))
            node = self.nodes[name] = _Node(name, self._num_made, self, tag)
        return node

    def add(self, node: _Node, priority: int, now: float) -> None:
        if not node.waiting_of:
            node.tag = max(node.tag, self._virtual_time)
            node.since = now
            self.patient[node] = None
        node.count_waiting(priority, 1)
        self._place(node)

    def remove(self, node: _Node, priority: int) -> None:
        node.count_waiting(priority, -1)
        self._settle(node)

    def admit(self, node: _Node, sequence: Sequence, now: float) -> None:
        self._virtual_time = max(self._virtual_time, node.tag)
        node.admit(sequence)
        node.since = now
        self.patient.pop(node, None)
        self.patient[node] = None  # now the last
        self._settle(node)

    def release(self, node: _Node, num_lanes: int) -> None:
        node.lanes -= num_lanes
        self._settle(node)

    def expire(self, node: _Node) -> None:
        del self.patient[node]
        node.is_overdue = True
        self._place(node)

    def _settle(self, node: _Node) -> None:
        """Update a node's place, or remove the node if it has no sequence left."""
        if not node.waiting_of:
            self.patient.pop(node, None)
            node.is_overdue = False
        self._place(node)
        if not node.waiting_of and not node.lanes:
            del self.nodes[node.name]
            if node.tag > self._virtual_time:
                self._remember(node)

    def _remember(self, node: _Node) -> None:
        self._idle_tags[node.name] = node.tag
        while len(self._idle_tags) > MAX_IDLE_TAGS:
            del self._idle_tags[next(iter(self._idle_tags))]

    def _place(self, node: _Node) -> None:
        if node.key is not None:
            del self.order[bisect_left(self.order, (node.key,))]
        node.key = node.place() if node.waiting_of else None
        if node.key is not None:
            insort(self.order, (node.key, node))


class _Forecast:
    """The order of a group while its first node is admitted again and again."""

    def __init__(self, group: _Group) -> None:
        self._order = group.order
        self._next = 0
        self._admitted: list[tuple[Key, _Node]] = []
        """A heap of copies of nodes, each after its admissions."""

    def first(self) -> _Node | None:
        if self._next < len(self._order) and not self._is_admitted_first():
            return self._order[self._next][1]
        return self._admitted[0][1] if self._admitted else None

    def admit_first(self, sequence: Sequence) -> None:
        """Admit a sequence of the first node: a copy of the node takes its place."""
        if self._next < len(self._order) and not self._is_admitted_first():
            node = self._order[self._next][1].copy()
            self._next += 1
        else:
            _, node = heapq.heappop(self._admitted)
        node.num_skipped += 1
        node.admit(sequence)
        if node.waiting_of:
            heapq.heappush(self._admitted, (node.place(), node))

    def _is_admitted_first(self) -> bool:
        return bool(self._admitted) and self._admitted[0][0] < self._order[self._next][0]


class FairQueue:
    """The waiting sequences of one engine, and the number of lanes that each client holds. Not
    thread-safe."""

    def __init__(self, overdue_s: float) -> None:
        """`overdue_s`: seconds of waiting without an admission after which a client comes first."""
        self._overdue_s = overdue_s
        self._hosts = _Group({})
        self._patient_clients: dict[_Node, None] = {}
        self._num_waiting = 0
        self.now = 0.0
        """Seconds; see `tick`."""

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no order."""
        for host in self._hosts.nodes.values():
            for client in self._clients(host).nodes.values():
                yield from client.waiting

    def tick(self, now: float) -> None:
        """Set the time, which never goes back."""
        self.now = now
        for patient in (self._hosts.patient, self._patient_clients):
            while patient:
                node = next(iter(patient))
                if node.since + self._overdue_s > now:
                    break
                node.group.expire(node)

    def forecast(self) -> Iterator[Sequence]:
        """The waiting sequences in the order in which they are admitted if each of them is. Changes
        nothing."""
        hosts = _Forecast(self._hosts)
        members: dict[str, _Forecast] = {}
        while (host := hosts.first()) is not None:
            clients = members.get(host.name)
            if clients is None:
                clients = members[host.name] = _Forecast(self._clients(host))
            client = clients.first()
            assert client is not None
            sequence = client.waiting[client.num_skipped]
            yield sequence
            clients.admit_first(sequence)
            hosts.admit_first(sequence)

    def deprived(self, patience_s: float) -> Sequence | None:
        """The next sequence in order, if its host, or its client within the host, holds no lane and
        has waited for `patience_s` seconds; else None."""
        if not self._hosts.order:
            return None
        host = self._hosts.order[0][1]
        client = self._clients(host).order[0][1]
        without = next((node for node in (host, client) if not node.lanes), None)
        waited = without is not None and without.since + patience_s <= self.now
        return client.waiting[0] if waited else None

    def must_share(self, holder: Principal, deprived: Sequence) -> bool:
        """Whether `holder` holds the most lanes for its weight (or as many as the most), and more
        lanes than `deprived` takes."""
        without = self._without_lanes(deprived)
        if without is None:
            return False
        most = max(node.load for node in without.group.nodes.values())
        name = holder.group if without.group is self._hosts else holder.name
        node = without.group.nodes.get(name)
        return node is not None and node.load == most and node.lanes > deprived.num_samples

    def _without_lanes(self, sequence: Sequence) -> _Node | None:
        host, client = self._nodes(sequence.request.principal)
        return next((node for node in (host, client) if not node.lanes), None)

    def add(self, sequence: Sequence) -> None:
        priority = sequence.request.priority
        host, client = self._nodes(sequence.request.principal)
        host.weight = sequence.request.principal.limits.weight
        insort(client.waiting, sequence, key=_by_order)
        client.group.add(client, priority, self.now)
        host.group.add(host, priority, self.now)
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence, which has ended."""
        host, client = self._take_out(sequence)
        for node in (client, host):
            node.group.remove(node, sequence.request.priority)

    def admit(self, sequence: Sequence) -> None:
        """Admit a waiting sequence to `num_samples` lanes."""
        host, client = self._take_out(sequence)
        for node in (client, host):
            node.group.admit(node, sequence, self.now)

    def release(self, principal: Principal, num_lanes: int) -> None:
        """Return lanes of a running sequence."""
        host, client = self._nodes(principal)
        for node in (client, host):
            node.group.release(node, num_lanes)

    def _take_out(self, sequence: Sequence) -> tuple[_Node, _Node]:
        host, client = self._nodes(sequence.request.principal)
        at = bisect_left(client.waiting, sequence.order, key=_by_order)
        assert client.waiting[at] is sequence
        del client.waiting[at]
        self._num_waiting -= 1
        return host, client

    def _nodes(self, principal: Principal) -> tuple[_Node, _Node]:
        host = self._hosts.node(principal.group)
        return host, self._clients(host).node(principal.name)

    def _clients(self, host: _Node) -> _Group:
        if host.members is None:
            host.members = _Group(self._patient_clients)
        return host.members

    def check_integrity(self, num_lanes: int) -> None:
        """Check that counts and orders agree with each other and with `num_lanes`, the lanes held.

        Raises:
            InvariantError: they do not.
        """
        clients: list[_Node] = []
        for host in self._hosts.nodes.values():
            members = self._clients(host)
            _check_group(members)
            clients += members.nodes.values()
            if host.lanes != sum(client.lanes for client in members.nodes.values()):
                raise InvariantError(f"{host.name} does not hold the lanes of its clients")
        _check_group(self._hosts)
        for client in clients:
            orders = [sequence.order for sequence in client.waiting]
            if orders != sorted(set(orders)) or len(orders) != sum(client.waiting_of.values()):
                raise InvariantError(f"the waiting sequences of {client.name} are not in order")
        if sum(client.lanes for client in clients) != num_lanes:
            raise InvariantError("the clients do not hold the lanes that are taken")
        if sum(len(client.waiting) for client in clients) != self._num_waiting:
            raise InvariantError("the waiting sequences are miscounted")


def _check_group(group: _Group) -> None:
    waiting = {name for name, node in group.nodes.items() if node.waiting_of}
    if {node.name for _, node in group.order} != waiting or len(group.order) != len(waiting):
        raise InvariantError("the order has not exactly those who wait")
    keys = [key for key, _ in group.order]
    if keys != sorted(node.place() for _, node in group.order):
        raise InvariantError("the order is not fair")
    if any(not node.waiting_of and not node.lanes for node in group.nodes.values()):
        raise InvariantError("a client without requests is kept")

"""Doorkeeper of a gRPC port: closes connections that take more than their share before they have proved who they are.

gRPC accepts connections by itself and has one limit for all of them together (`grpc.max_allowed_incoming_connections`).
It asks for the server's keys at each one, though, and that wakes the doorkeeper, which looks for the port's connections
among the open files of this process and shuts down those that budgets.py names. No byte passes through it, so it costs
what is sent nothing. While no connection waits to prove who it is, the doorkeeper sleeps.

What happens on failure: where the open files cannot be listed, nothing is closed; gRPC's limit still holds.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ravnest.net.address import is_ip_address, is_wildcard, peer_place, plain_host
from ravnest.net.door.budgets import Budgets, Closing, IncomingConnection, connections_to_close, origin_of
from ravnest.net.door.open_connections import Found, OpenConnections, Peer

_LOOK_SECONDS: Final = 0.25
_BUSY_LOOK_SECONDS: Final = 0.02
"""Pause between two looks while connections come faster than they prove who they are."""
_GATHER_SECONDS: Final = 1.0
"""Time between the first connection that is closed and the report, which counts those that follow."""
_REPORT_SECONDS: Final = 30.0
"""Minimum time between two reports of one address."""
_MAX_REPORTED: Final = 8
"""Addresses that are reported by themselves within that time."""
_MAX_COUNTED: Final = 1024
_MANY_CLOSED: Final = 16
"""Connections of one address that are closed before that is told."""
_MANY_FAILED: Final = 200
"""Connections of one address that end by themselves without a call before that is told: the first contact of a provider
is one of those."""


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """Connections of one address that were closed or failed, to be told to the user."""

    address: str
    """The address; empty for all the others together."""
    connections: int
    reason: str

    def __str__(self) -> str:
        whose = f"from {self.address}" if self.address else "from other addresses"
        return f"{self.connections} connection{'' if self.connections == 1 else 's'} {whose} turned away: {self.reason}"


class Doorkeeper:
    """Watches one port from `start` to `stop`, on a thread of its own. Every method may be called from any thread."""

    def __init__(self, tell: Callable[[TurnedAway], None]) -> None:
        """`tell` is called on the doorkeeper's thread, seldom, however many connections come."""
        self._tell = tell
        self._budgets: Budgets | None = None
        self._files: OpenConnections | None = None
        self._knocked = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._callers: dict[Peer, str] = {}
        self._first_seen: dict[Peer, float] = {}
        self._reports = _Reports()

    def start(self, host: str, port: int, budgets: Budgets) -> None:
        """Begins to watch the connections to this port of this machine."""
        plain = plain_host(host)
        self._files = OpenConnections(plain if is_ip_address(plain) and not is_wildcard(plain) else "", port)
        self._budgets = budgets
        self._thread = threading.Thread(target=self._watch, name="ravnest-door", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch; idempotent."""
        self._stopped = True
        self._knocked.set()
        if self._thread is not None:
            self._thread.join()

    def knock(self) -> None:
        """A connection has come in."""
        self._knocked.set()

    def calls(self, peer: str, caller: str) -> None:
        """A call came over the connection of this peer, in gRPC's words, and `caller` has proved who it is."""
        place = peer_place(peer)
        if place is not None:
            with self._lock:
                if not self._callers.get(place) or ":" not in caller:
                    self._callers[place] = caller

    def _watch(self) -> None:
        pause: float | None = None
        while True:
            self._knocked.wait(pause)
            self._knocked.clear()
            if self._stopped:
                return
            try:
                pause = self._look(time.monotonic())
            except OSError:
                # No descriptor is left to look with.
                pause = _LOOK_SECONDS
            # However many knock: one look takes them all.
            if pause is not None:
                time.sleep(_BUSY_LOOK_SECONDS)

    def _look(self, now: float) -> float | None:
        """Closes what is over the budgets; how long until the next look, None: until a connection comes."""
        assert self._budgets is not None and self._files is not None
        with self._lock:
            # One that calls while the files are listed may not be among them, and is not forgotten for that.
            proved_before = set(self._callers)
        open_now = self._files.look()
        seen = self._update(open_now, proved_before, now)
        closing = connections_to_close(seen, now, self._budgets)
        for each in closing:
            self._files.shut_down(open_now[each.connection.peer])
        for report in self._reports.closed(closing, now):
            self._tell(report)
        waiting = sum(not connection.is_node for connection in seen) - len(closing)
        if closing or waiting > self._budgets.waiting_per_address // 2:
            return _BUSY_LOOK_SECONDS
        return _LOOK_SECONDS if waiting > 0 or self._reports.pending else None

    def _update(self, open_now: Mapping[Peer, Found], proved_before: set[Peer], now: float) -> list[IncomingConnection]:
        with self._lock:
            ended = [peer for peer in self._first_seen if peer not in open_now and peer not in self._callers]
            for peer in proved_before:
                if peer not in open_now:
                    del self._callers[peer]
            callers = dict(self._callers)
        self._reports.ended(ended)
        self._first_seen = {peer: self._first_seen.get(peer, now) for peer in open_now}
        return [
            IncomingConnection(peer, self._first_seen[peer], found.has_spoken, callers.get(peer, ""))
            for peer, found in open_now.items()
        ]


class _Reports:
    """What is told of connections that were turned away: of each address once in a while, and only of many."""

    def __init__(self) -> None:
        self._closed: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}
        self._first_at: dict[str, float] = {}
        self._failed: Counter[str] = Counter()
        self._closed_by_us: set[Peer] = set()
        self._since = 0.0
        self._told: dict[str, float] = {}

    @property
    def pending(self) -> bool:
        """Whether there will be something to tell, once it has not been told for a while."""
        return any(count >= _MANY_CLOSED for count in self._closed.values())

    def ended(self, peers: list[Peer]) -> None:
        """These connections are gone, and no call came over them."""
        for peer in peers:
            if peer in self._closed_by_us:
                self._closed_by_us.discard(peer)
            else:
                self._failed[_name(self._failed, origin_of(peer[0]))] += 1

    def closed(self, closing: list[Closing], now: float) -> Iterator[TurnedAway]:
        """Takes note of what is closed, and gives the reports that are due."""
        for each in closing:
            self._closed_by_us.add(each.connection.peer)
            self._count(each.connection.origin, 1, each.reason, now)
        for origin in [origin for origin, count in self._failed.items() if count >= _MANY_FAILED]:
            self._count(origin, self._failed.pop(origin), "they ended without showing a certificate of this swarm", now)
        self._told = {origin: at for origin, at in self._told.items() if now - at < _REPORT_SECONDS}
        many = [origin for origin in self._closed if self._is_due(origin, now)]
        for origin in many[: _MAX_REPORTED - len(self._told)]:
            self._told[origin] = now
            del self._first_at[origin]
            yield TurnedAway(origin, self._closed.pop(origin), self._reasons.pop(origin))
        if now - self._since > _REPORT_SECONDS:
            # A few in a while are the scanners that try every port there is.
            self._since = now
            self._failed.clear()
            for origin in [origin for origin, count in self._closed.items() if count < _MANY_CLOSED]:
                del self._closed[origin], self._reasons[origin], self._first_at[origin]

    def _is_due(self, origin: str, now: float) -> bool:
        many = self._closed[origin] >= _MANY_CLOSED
        return many and origin not in self._told and now - self._first_at[origin] >= _GATHER_SECONDS

    def _count(self, origin: str, connections: int, reason: str, now: float) -> None:
        name = _name(self._closed, origin)
        self._first_at.setdefault(name, now)
        self._closed[name] += connections
        self._reasons[name] = reason


def _name(counts: "Counter[str]", origin: str) -> str:
    """The name to count an address under: there may be more addresses than there is room to count."""
    return origin if origin in counts or len(counts) < _MAX_COUNTED else ""

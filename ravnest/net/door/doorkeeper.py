"""Doorkeeper of a gRPC port: closes connections of callers that use more than their share before they prove who they
are.

gRPC accepts connections by itself, and has one limit for all of them together
(`grpc.max_allowed_incoming_connections`). But it asks for the server's keys on each connection, and that wakes the
doorkeeper. The doorkeeper then looks for the port's connections among the open files of this process, and shuts down
those that budgets.py names. It adds no cost to the traffic, because no byte passes through it. While no connection
waits to prove its identity, it sleeps.

If the open files cannot be listed, the doorkeeper closes nothing, and gRPC's limit still holds.
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
"""Pause between two looks while connections come faster than they prove their identity."""
_GATHER_SECONDS: Final = 1.0
"""Time between the first closed connection and the report, which counts the ones that follow."""
_REPORT_SECONDS: Final = 30.0
"""Minimum time between two reports of one address."""
_MAX_REPORTED: Final = 8
"""Addresses that get a report of their own within that time."""
_MAX_COUNTED: Final = 1024
_MANY_CLOSED: Final = 16
"""Minimum number of closed connections of one address for a report."""
_MANY_FAILED: Final = 200
"""Minimum number of connections of one address that end without a call for a report. The first contact of every
provider is such a connection."""


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """Report about connections of one address that were closed or failed."""

    address: str
    """The address; empty for all other addresses together."""
    connections: int
    reason: str

    def __str__(self) -> str:
        whose = f"from {self.address}" if self.address else "from other addresses"
        return f"{self.connections} connection{'' if self.connections == 1 else 's'} {whose} turned away: {self.reason}"


class Doorkeeper:
    """Watches one port from `start` to `stop`, on a thread of its own. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._knocked = threading.Event()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._callers: dict[Peer, str] = {}
        self._first_seen: dict[Peer, float] = {}
        self._reports = _Reports()

    def start(self, host: str, port: int, budgets: Budgets, tell: Callable[[TurnedAway], None]) -> None:
        """Watch the connections to this port of this machine from now on.

        `tell` is called on the doorkeeper's thread, rarely, however many connections come.
        """
        plain = plain_host(host)
        files = OpenConnections(plain if is_ip_address(plain) and not is_wildcard(plain) else "", port)
        thread = threading.Thread(target=self._watch, args=(files, budgets, tell), name="ravnest-door", daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """End the watch; idempotent."""
        self._stopped.set()
        self._knocked.set()
        for thread in self._threads:
            thread.join()

    def knock(self) -> None:
        """A connection has come in."""
        self._knocked.set()

    def calls(self, peer: str, caller: str) -> None:
        """A call came from this peer, in gRPC's words, and `caller` has proved its identity."""
        place = peer_place(peer)
        if place is not None:
            with self._lock:
                if not self._callers.get(place) or ":" not in caller:
                    self._callers[place] = caller

    def _watch(self, files: OpenConnections, budgets: Budgets, tell: Callable[[TurnedAway], None]) -> None:
        pause: float | None = None
        while True:
            self._knocked.wait(pause)
            self._knocked.clear()
            if self._stopped.is_set():
                return
            try:
                pause = self._look(files, budgets, tell, time.monotonic())
            except OSError:
                # No descriptor is left to look with.
                pause = _LOOK_SECONDS
            # Connections that come in this time need only one look together.
            if pause is not None:
                self._stopped.wait(_BUSY_LOOK_SECONDS)

    def _look(
        self, files: OpenConnections, budgets: Budgets, tell: Callable[[TurnedAway], None], now: float
    ) -> float | None:
        """Close the connections over the budgets. Returns the time until the next look; None: at the next
        connection."""
        with self._lock:
            # A caller that proves its identity while the files are listed may not be among them, and must not be
            # forgotten.
            proved_before = set(self._callers)
        open_now = files.look()
        seen = self._update(open_now, proved_before, now)
        closing = connections_to_close(seen, now, budgets)
        for each in closing:
            files.shut_down(open_now[each.connection.peer])
        for report in self._reports.closed(closing, now):
            tell(report)
        waiting = sum(not connection.is_node for connection in seen) - len(closing)
        if closing or waiting > budgets.waiting_per_address // 2:
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
    """Reports about connections that were turned away: for each address rarely, and only about many connections."""

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
        """Whether there is something to report, as soon as the time since the last report allows."""
        return any(count >= _MANY_CLOSED for count in self._closed.values())

    def ended(self, peers: list[Peer]) -> None:
        """These connections are gone, and no call came over them."""
        for peer in peers:
            if peer in self._closed_by_us:
                self._closed_by_us.discard(peer)
            else:
                self._failed[_name(self._failed, origin_of(peer[0]))] += 1

    def closed(self, closing: list[Closing], now: float) -> Iterator[TurnedAway]:
        """Record the connections that are closed. Returns the reports that are due."""
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
            # A few connections now and then are port scanners.
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
    """The name under which an address is counted; there may be more addresses than room to count them."""
    return origin if origin in counts or len(counts) < _MAX_COUNTED else ""

"""Network between the hosts, in virtual time: uplink, path, downlink, and lost packets."""

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from tests.wan.packets import Frame, Nat, parse
from tests.wan.shaping import Agenda, Line, chunk_bytes, survivors
from tests.wan.topology import Host, Path, Topology

_LATE_SHARE = 0.01
"""Share of a path's delay by which a frame may arrive late, together with others. To wake up for each frame would keep
the switch busy."""

Deliver = Callable[[bytes], None]
_Settings = TypeVar("_Settings", Host, Path)


@dataclass
class HostCounters:
    """Traffic on a host's lines, in bytes of IP packets. Packets are segments, even if the kernel bundles them."""

    sent_bytes: int = 0
    sent_packets: int = 0
    received_bytes: int = 0
    received_packets: int = 0
    uplink_dropped_packets: int = 0
    downlink_dropped_packets: int = 0
    blocked_packets: int = 0
    """Blocked because the host is behind a NAT."""


@dataclass
class PathCounters:
    """Packets that passed a path, and those that did not, by reason."""

    passed_bytes: int = 0
    passed_packets: int = 0
    lost_packets: int = 0
    cut_packets: int = 0
    dropped_packets: int = 0
    """Dropped because the path's own queue was full."""


class Network:
    """Accepts the frames that hosts send, and calls the receiver's `deliver` when they arrive, unless they are lost.

    `run(now)` must be called at the time `due()`, and before every `accept`.
    """

    def __init__(self, topology: Topology, addresses: dict[str, bytes], deliver: dict[str, Deliver]) -> None:
        self._agenda = Agenda()
        chance = random.Random(topology.seed)
        self._ends = {host.name: _End(self._agenda, host, deliver[host.name]) for host in topology.hosts}
        for source, end in self._ends.items():
            for target, other in self._ends.items():
                if source != target:
                    settings = topology.paths.get((source, target), topology.default)
                    end.paths[addresses[target]] = _Way(self._agenda, settings, end, other, chance)
        self._ways = {
            (way.source.host.name, way.target.host.name): way
            for end in self._ends.values()
            for way in end.paths.values()
        }
        self.due = self._agenda.due
        self.run = self._agenda.run

    def accept(self, now: float, source: str, data: bytes) -> None:
        """Accepts a frame from a host. A frame that is not for another host of the lab is lost."""
        frame = parse(data)
        if frame is not None:
            self._ends[source].send(now, frame)

    def change_host(self, name: str, changes: dict[str, Any]) -> None:
        """Changes some of a host's settings. ValueError: they are invalid; nothing has changed."""
        end = self._end(name)
        end.set(_changed(end.host, changes))
        for way in self._ways.values():
            if end in (way.source, way.target):
                way.fit_chunks()

    def change_path(self, source: str, target: str, changes: dict[str, Any]) -> None:
        """Changes some of a path's settings. ValueError: they are invalid; nothing has changed."""
        way = self._way(source, target)
        way.set(_changed(way.settings, changes))

    def cut(self, source: str, target: str, cut: bool) -> None:
        """Cuts or heals a path. A path that is cut loses all frames, including those in transit."""
        self._way(source, target).cut = cut

    def status(self) -> dict[str, Any]:
        """All settings and counters, as plain data."""
        hosts = {name: asdict(end.host) | {"counters": asdict(end.counted())} for name, end in self._ends.items()}
        paths = [
            {"source": source, "target": target, "cut": way.cut}
            | asdict(way.settings)
            | {"counters": asdict(way.counted())}
            for (source, target), way in self._ways.items()
        ]
        return {"hosts": hosts, "paths": paths}

    def _end(self, name: str) -> "_End":
        if name not in self._ends:
            raise ValueError(f"there is no host {name}: hosts are {', '.join(self._ends)}")
        return self._ends[name]

    def _way(self, source: str, target: str) -> "_Way":
        self._end(source), self._end(target)
        if source == target:
            raise ValueError(f"a path leads from one host to another, not from {source} to itself")
        return self._ways[source, target]


class _End:
    """A host as the network sees it: its two lines, its router, and the paths that start at it."""

    def __init__(self, agenda: Agenda, host: Host, deliver: Deliver) -> None:
        self.host = host
        self.paths: dict[bytes, _Way] = {}
        self._deliver = deliver
        self._nat = Nat()
        self._counters = HostCounters()
        self._uplink = Line(agenda, self._leave, lambda frame: self.paths[frame.target].delay_seconds)
        self.downlink = Line(agenda, self._receive)
        self.set(host)

    def set(self, host: Host) -> None:
        self.host = host
        self._uplink.set(host.up_mbps, host.queue_bytes)
        self.downlink.set(host.down_mbps, host.queue_bytes)

    def counted(self) -> HostCounters:
        return replace(
            self._counters,
            uplink_dropped_packets=self._uplink.dropped_packets,
            downlink_dropped_packets=self.downlink.dropped_packets,
        )

    def send(self, now: float, frame: Frame) -> None:
        path = self.paths.get(frame.target)
        if path is None:
            return
        self._counters.sent_bytes += frame.size_bytes
        self._counters.sent_packets += frame.segments
        self._nat.outbound(frame)
        if frame.segments > 1 and frame.size_bytes > path.chunk_bytes:
            for chunk in frame.chunks(path.chunk_bytes):
                self._uplink.offer(now, chunk)
        else:
            self._uplink.offer(now, frame)

    def arrive(self, now: float, frame: Frame) -> None:
        if self.host.nat and not self._nat.admits(frame):
            self._counters.blocked_packets += frame.segments
        else:
            self.downlink.offer(now, frame)

    def _leave(self, now: float, frame: Frame) -> None:
        self.paths[frame.target].enter(now, frame)

    def _receive(self, now: float, frame: Frame) -> None:
        self._counters.received_bytes += frame.size_bytes
        self._counters.received_packets += frame.segments
        self._deliver(frame.data)


class _Way:
    """A path in one direction: loss, its own rate if it has one, then the delay."""

    def __init__(self, agenda: Agenda, settings: Path, source: _End, target: _End, chance: random.Random) -> None:
        self.source = source
        self.target = target
        self.cut = False
        self._agenda = agenda
        self._chance = chance
        self._counters = PathCounters()
        self._line = Line(agenda, self._travel, lambda frame: self.delay_seconds)
        self._last_arrival = 0.0
        self.set(settings)

    def set(self, settings: Path) -> None:
        self.settings = settings
        self.delay_seconds = settings.delay_ms / 1e3
        self._line.set(settings.rate_mbps, settings.queue_bytes)
        self.fit_chunks()

    def fit_chunks(self) -> None:
        self.chunk_bytes = chunk_bytes(self.source.host.up_mbps, self.settings.rate_mbps, self.target.host.down_mbps)

    def counted(self) -> PathCounters:
        return replace(self._counters, dropped_packets=self._line.dropped_packets)

    def enter(self, now: float, frame: Frame) -> None:
        if self.cut:
            self._counters.cut_packets += frame.segments
        elif self.settings.loss:
            self._counters.lost_packets += frame.segments
            for rest in survivors(frame, self.settings.loss, self._chance):
                self._counters.lost_packets -= rest.segments
                self._line.offer(now, rest)
        else:
            self._line.offer(now, frame)

    def _travel(self, now: float, frame: Frame) -> None:
        # After the delay was shortened, later frames still must not overtake those in transit.
        self._last_arrival = max(now + self.delay_seconds, self._last_arrival)
        if self._last_arrival <= now:
            self._arrive(now, frame)
        else:
            unseen_seconds = max(self.target.downlink.busy_seconds(frame), _LATE_SHARE * self.delay_seconds)
            self._agenda.at(self._last_arrival, self._arrive, frame, unseen_seconds)

    def _arrive(self, now: float, frame: Frame) -> None:
        if self.cut:
            self._counters.cut_packets += frame.segments
            return
        self._counters.passed_bytes += frame.size_bytes
        self._counters.passed_packets += frame.segments
        self.target.arrive(now, frame)


def _changed(settings: _Settings, changes: dict[str, Any]) -> _Settings:
    try:
        if "name" in changes:
            raise TypeError("a host keeps its name")
        return replace(settings, **changes)
    except TypeError as error:
        raise ValueError(f"this cannot be set: {error}") from error

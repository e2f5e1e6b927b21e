"""Topology of a lab: hosts with their lines, and a path for each ordered pair of hosts."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, TypedDict

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")


@dataclass(frozen=True)
class Host:
    """A machine and its line to the internet. A rate of `None` is limited only by the switch."""

    name: str
    up_mbps: float | None = None
    down_mbps: float | None = None
    nat: bool = False
    """Other hosts cannot open connections to this host; connections that it opens work in both directions."""
    queue_bytes: int | None = None
    """Queue of each of its two lines; default: 100 ms of the line's rate, at least 64 KiB."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"host name {self.name!r} must be lower-case letters, digits and dashes, at most 31")
        for what in ("up_mbps", "down_mbps", "queue_bytes"):
            _positive(f"{what} of host {self.name}", getattr(self, what))


@dataclass(frozen=True)
class Path:
    """Path between two hosts in one direction: `delay_ms` is one way, `loss` the fraction of lost packets."""

    delay_ms: float = 0.0
    loss: float = 0.0
    rate_mbps: float | None = None
    queue_bytes: int | None = None
    """Queue of a path with a rate; default: 100 ms of that rate, at least 64 KiB."""

    def __post_init__(self) -> None:
        if not 0 <= self.delay_ms < 60_000:
            raise ValueError(f"delay_ms of a path must be from 0 to 60000, not {self.delay_ms}")
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss of a path is a fraction from 0 to 1, not {self.loss}")
        _positive("rate_mbps of a path", self.rate_mbps)
        _positive("queue_bytes of a path", self.queue_bytes)


class HostChanges(TypedDict, total=False):
    up_mbps: float | None
    down_mbps: float | None
    nat: bool
    queue_bytes: int | None


class PathChanges(TypedDict, total=False):
    delay_ms: float
    loss: float
    rate_mbps: float | None
    queue_bytes: int | None


@dataclass(frozen=True)
class Topology:
    """All hosts, the path of every ordered pair, and the seed of the losses."""

    hosts: tuple[Host, ...]
    default: Path = field(default_factory=Path)
    paths: Mapping[tuple[str, str], Path] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if len(set(names)) != len(names):
            raise ValueError(f"the names of the hosts of a lab must differ, but they are {', '.join(names)}")
        if not 1 <= len(names) <= 200:
            raise ValueError(f"a lab has 1 to 200 hosts, not {len(names)}")
        for source, target in self.paths:
            if source == target or not {source, target} <= set(names):
                raise ValueError(f"there is no path from {source} to {target}: hosts are {', '.join(names)}")


def read_topology(file: FilePath) -> Topology:
    """The topology that a TOML file describes (docs/wan-lab.md has an example). ValueError: what is wrong with it."""
    try:
        table = tomllib.loads(file.read_text())
        unknown = table.keys() - {"path", "hosts", "paths", "seed"}
        if unknown:
            raise ValueError(f"unknown entry {', '.join(sorted(unknown))}; known are path, hosts, paths and seed")
        default = dict(table.get("path", {}))
        paths: dict[tuple[str, str], Path] = {}
        for entry in table.get("paths", []):
            source, target, *ends = entry["between"]
            if ends:
                raise ValueError("`between` of a path names two hosts")
            changes = {key: value for key, value in entry.items() if key not in ("between", "both_ways")}
            path = Path(**{**default, **changes})
            paths[source, target] = path
            if entry.get("both_ways", True):
                paths[target, source] = path
        hosts = tuple(Host(name=name, **settings) for name, settings in table.get("hosts", {}).items())
        return Topology(hosts, Path(**default), paths, table.get("seed", 0))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} does not describe a lab: {error}") from error


def _positive(what: str, value: Any) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"{what} must be more than 0, not {value}; leave it out for no limit")

"""WAN lab: real hosts on one machine, each a network namespace with its own line, connected by one switch.

    with Lab([Host("a", up_mbps=20, down_mbps=100, nat=True), Host("b")], default=Path(delay_ms=20)) as lab:
        server = lab.host("b").popen(["python3", "-m", "http.server"])
        lab.pair("a", "b").set(delay_ms=50, loss=0.01)
        lab.cut("a", "b")

However the `with` block ends, the processes on the hosts are killed and everything is removed. If the owner itself is
killed, the switch does that; if the switch is killed too, the next lab does.
"""

import functools
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path as FilePath
from types import TracebackType
from typing import Any, Final, Self, Unpack

from tests import warm
from tests.wan import namespaces
from tests.wan.control import Control, socket_path
from tests.wan.namespaces import LabError
from tests.wan.network import HostCounters, PathCounters
from tests.wan.topology import Host, HostChanges, Path, PathChanges, Topology

_ROOT: Final = FilePath(__file__).resolve().parents[2]
_SERIAL = itertools.count()
_STOP_SECONDS: Final = 10.0


class RunningLab:
    """A running lab, of this process or another: its hosts and paths."""

    def __init__(self, name: str) -> None:
        """Attaches to the lab of that name. LabError: its switch cannot be reached."""
        self.name = name
        self._processes: list[warm.Process] = []
        self._attach(Control(name))

    def _attach(self, control: Control) -> None:
        self._control = control
        addresses = self.status()["addresses"]
        self.hosts = {host: LabHost(self, host, address) for host, address in addresses.items()}

    def host(self, name: str) -> "LabHost":
        if name not in self.hosts:
            raise ValueError(f"there is no host {name} in the lab: hosts are {', '.join(self.hosts)}")
        return self.hosts[name]

    def path(self, source: str, target: str) -> "LabPath":
        """The path between two hosts, in one direction."""
        return LabPath(self, ((self.host(source).name, self.host(target).name),))

    def pair(self, one: str, other: str) -> "LabPath":
        """The paths between two hosts, in both directions."""
        return LabPath(self, ((self.host(one).name, self.host(other).name), (other, one)))

    def cut(self, one: str, other: str) -> None:
        """Cuts both directions; `lab.path(…).cut()` cuts one."""
        self.pair(one, other).cut()

    def heal(self, one: str, other: str) -> None:
        self.pair(one, other).heal()

    def status(self) -> dict[str, Any]:
        """Every setting and counter: `addresses` and `hosts` by name, the list `paths`, and for the switch itself
        `real_time` (whether it has real-time priority) and `busy_seconds`.
        """
        return self.ask("status")

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Sends a request to the switch. ValueError: it refuses; LabError: it is gone."""
        return self._control.ask(do, **arguments)

    def started(self, process: "warm.Process") -> None:
        self._processes.append(process)


class Lab(RunningLab):
    """A lab that this process owns, for the duration of a `with` block.

    - ValueError, before anything is built: a host or path has invalid settings.
    - LabError on entering: the machine cannot run labs; the message is that of `Lab.unavailable()`.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        default: Path | None = None,
        paths: Mapping[tuple[str, str], Path] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        """`default` is the path of every ordered pair that is not in `paths`; `seed` determines the lost packets."""
        self.topology = Topology(tuple(hosts), default or Path(), paths or {}, seed)

    @staticmethod
    @functools.cache
    def unavailable() -> str | None:
        """The reason why this machine cannot run a lab, with the remedy, or None if it can."""
        return namespaces.unavailable()

    @property
    def switch_pid(self) -> int:
        """Process id of the switch of a lab that has been entered."""
        return self._switch.pid

    def __enter__(self) -> Self:
        if reason := self.unavailable():
            raise LabError(reason)
        namespaces.sweep()
        serial = next(_SERIAL)
        self.name = namespaces.lab_name(serial)
        self._processes = []
        with ExitStack() as undo:
            self._build(f"10.{64 + os.getpid() % 128}.{serial % 256}", undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kills the processes on the hosts and removes the lab; does nothing the second time."""
        self._undo.close()

    def _build(self, network: str, undo: ExitStack) -> None:
        """Builds the lab, and registers the undoing of each step."""
        topology = self.topology
        addresses = {host.name: f"{network}.{number}" for number, host in enumerate(topology.hosts, 1)}
        undo.callback(namespaces.remove, self.name)
        socket_path(self.name).parent.mkdir(mode=0o700, parents=True)
        namespaces.add([namespaces.namespace(self.name, host) for host in addresses])
        self._switch = subprocess.Popen(
            [sys.executable, "-m", "tests.wan.switch"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C goes to the lab, which then ends the switch
        )
        undo.callback(self._end_switch)
        description = {
            "lab": self.name,
            "owner": os.getpid(),
            "addresses": addresses,
            "hosts": [asdict(host) for host in topology.hosts],
            "default": asdict(topology.default),
            "paths": [
                {"source": source, "target": target, "settings": asdict(path)}
                for (source, target), path in topology.paths.items()
            ],
            "seed": topology.seed,
        }
        assert self._switch.stdin and self._switch.stdout
        self._switch.stdin.write(json.dumps(description) + "\n")
        self._switch.stdin.flush()
        if not self._switch.stdout.readline():
            raise LabError("the switch of the lab did not start; its standard error has the reason")
        control = Control(self.name)
        undo.callback(control.close)
        self._attach(control)
        undo.callback(self._end_processes)
        for host, address in addresses.items():
            namespaces.configure(namespaces.namespace(self.name, host), address)

    def _end_processes(self) -> None:
        # A process that has just been started may not have entered its namespace yet, and would not be found there.
        for process in self._processes:
            process.kill()
        namespaces.end_processes(self.name)
        for process in self._processes:
            process.wait()

    def _end_switch(self) -> None:
        self._switch.terminate()
        self._switch.communicate(timeout=_STOP_SECONDS)


class LabHost:
    """A host of a running lab."""

    def __init__(self, lab: RunningLab, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.namespace = namespaces.namespace(lab.name, name)
        self._lab = lab

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on this host; it replaces itself by the program, so signals reach that."""
        return ["ip", "netns", "exec", self.namespace, *argv]

    def popen(self, argv: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Starts a program on this host; options as for `subprocess.Popen`. The end of the lab kills it."""
        process = subprocess.Popen(self.command(argv), **options)
        self._lab.started(process)
        return process

    def warm(self, argv: Sequence[str], **options: Any) -> "warm.Process":
        """Starts `ravnest`, or a program of these tests, in the same way, with its imports already done."""
        process = warm.started(self.command(argv), **options)
        self._lab.started(process)
        return process

    def run(self, argv: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[Any]":
        """Runs a program on this host and waits for it; options as for `subprocess.run`."""
        return subprocess.run(self.command(argv), **options)

    def open_socket(self, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """A socket of the calling process on this host's network."""
        return namespaces.open_socket(self.namespace, kind)

    def set(self, **changes: Unpack[HostChanges]) -> None:
        """Changes the given settings of the host's lines. A rate of None is no limit."""
        self._lab.ask("set_host", host=self.name, changes=changes)

    def block_inbound(self) -> None:
        """Puts the host behind a NAT: other hosts cannot open connections to it; open connections stay."""
        self.set(nat=True)

    def allow_inbound(self) -> None:
        self.set(nat=False)

    def unplug(self) -> None:
        """Cuts all paths from and to this host."""
        self._all_paths().cut()

    def plug_in(self) -> None:
        """Heals all paths from and to this host."""
        self._all_paths().heal()

    @property
    def counters(self) -> HostCounters:
        return HostCounters(**self._lab.status()["hosts"][self.name]["counters"])

    def _all_paths(self) -> "LabPath":
        others = [name for name in self._lab.hosts if name != self.name]
        return LabPath(self._lab, tuple(way for other in others for way in ((self.name, other), (other, self.name))))


class LabPath:
    """One path of a running lab, or several paths that are changed together."""

    def __init__(self, lab: RunningLab, ways: tuple[tuple[str, str], ...]) -> None:
        self._lab = lab
        self._ways = ways

    def set(self, **changes: Unpack[PathChanges]) -> None:
        """Changes the given settings of the path. A rate of None is no limit."""
        for source, target in self._ways:
            self._lab.ask("set_path", source=source, target=target, changes=changes)

    def cut(self) -> None:
        """Loses all packets from now on, including those in transit."""
        self._cut(True)

    def heal(self) -> None:
        self._cut(False)

    @property
    def counters(self) -> PathCounters:
        """Packets passed and lost; for several paths the sum."""
        every = {(entry["source"], entry["target"]): entry["counters"] for entry in self._lab.status()["paths"]}
        names = PathCounters.__dataclass_fields__
        return PathCounters(**{name: sum(every[way][name] for way in self._ways) for name in names})

    def _cut(self, cut: bool) -> None:
        for source, target in self._ways:
            self._lab.ask("cut", source=source, target=target, cut=cut)

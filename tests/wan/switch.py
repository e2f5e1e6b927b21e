"""Switch of a lab: one process that reads and writes the TUN devices of all hosts and delays the frames.

The switch sleeps until a frame arrives or is due, and runs with real-time priority if that is permitted. If the lab's
owner ends without closing the lab, the switch removes the lab and ends too.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any, Final

from tests.wan import namespaces
from tests.wan.control import socket_path
from tests.wan.network import Deliver, Network
from tests.wan.topology import Host, Path, Topology

_FRAME_BYTES: Final = 10 + 65535
_BATCH: Final = 32
"""Frames read from one host before it is the turn of the others."""
_REQUEST_BYTES: Final = 65536


def main() -> None:
    """Reads the lab's description from standard input; prints one line once all devices exist."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    description = json.loads(sys.stdin.readline())
    lab, owner = description["lab"], description["owner"]
    topology = Topology(
        tuple(Host(**host) for host in description["hosts"]),
        Path(**description["default"]),
        {(entry["source"], entry["target"]): Path(**entry["settings"]) for entry in description["paths"]},
        description["seed"],
    )
    devices = {host.name: namespaces.open_tun(namespaces.namespace(lab, host.name)) for host in topology.hosts}
    owner_ends = os.pidfd_open(owner)
    if os.getppid() != owner:  # the owner has already ended: the descriptor may be that of another process
        namespaces.remove(lab)
        return
    addresses = {name: socket.inet_aton(address) for name, address in description["addresses"].items()}
    switch = Switch(topology, addresses, devices, lab)
    print("ready", flush=True)
    gc.freeze()
    gc.disable()  # there are no reference cycles here, and a collection would delay frames
    if switch.serve(owner_ends) == owner_ends:
        namespaces.remove(lab)


class Switch:
    """Moves frames between devices and network, and answers requests on the control socket."""

    def __init__(self, topology: Topology, addresses: dict[str, bytes], devices: dict[str, int], lab: str) -> None:
        deliver = {name: _writer(device) for name, device in devices.items()}
        self._network = Network(topology, addresses, deliver)
        self._devices = {device: name for name, device in devices.items()}
        self._addresses = {name: socket.inet_ntoa(address) for name, address in addresses.items()}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(socket_path(lab)))
        self._listener.listen()
        self._clients: dict[int, tuple[socket.socket, bytearray]] = {}
        self._real_time = _ask_for_real_time()
        self._stopped = False

    def serve(self, owner_ends: int) -> int | None:
        """Runs until it is asked to stop (None) or until `owner_ends` is readable (that descriptor)."""
        network, devices, listener = self._network, self._devices, self._listener.fileno()
        descriptors = [*devices, listener, owner_ends]
        while not self._stopped:
            network.run(time.monotonic())
            due = network.due()
            wait = None if due is None else max(0.0, due - time.monotonic())
            # Unlike poll and epoll, select waits with microseconds.
            ready, _, _ = select.select(descriptors, (), (), wait)
            for descriptor in ready:
                if descriptor in devices:
                    self._read(descriptor)
                elif descriptor == owner_ends:
                    return owner_ends
                elif descriptor == listener:
                    client, _ = self._listener.accept()
                    self._clients[client.fileno()] = client, bytearray()
                    descriptors.append(client.fileno())
                elif not self._answer(descriptor):
                    self._clients.pop(descriptor)[0].close()
                    descriptors.remove(descriptor)
        return None

    def _read(self, device: int) -> None:
        network, name = self._network, self._devices[device]
        for _ in range(_BATCH):
            try:
                data = os.read(device, _FRAME_BYTES)
            except BlockingIOError:
                return
            now = time.monotonic()
            network.run(now)
            network.accept(now, name, data)

    def _answer(self, descriptor: int) -> bool:
        """Serves the requests of a client; False if the client is gone or sends invalid data."""
        client, buffer = self._clients[descriptor]
        with suppress(OSError):
            received = client.recv(_REQUEST_BYTES)
            buffer += received
            while (end := buffer.find(b"\n")) >= 0:
                line = bytes(buffer[:end])
                del buffer[: end + 1]
                client.sendall(json.dumps(self._serve_request(line)).encode() + b"\n")
            return bool(received) and len(buffer) < _REQUEST_BYTES
        return False

    def _serve_request(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            match request.pop("do"):
                case "set_host":
                    self._network.change_host(request["host"], request["changes"])
                case "set_path":
                    self._network.change_path(request["source"], request["target"], request["changes"])
                case "cut":
                    self._network.cut(request["source"], request["target"], request["cut"])
                case "status":
                    return self._network.status() | {
                        "addresses": self._addresses,
                        "real_time": self._real_time,
                        "busy_seconds": time.process_time(),
                    }
                case "stop":
                    self._stopped = True
                case unknown:
                    raise ValueError(f"the switch does not know the request {unknown!r}")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return {"error": str(error)}
        return {}


def _writer(device: int) -> Deliver:
    def deliver(data: bytes) -> None:
        # If the device is not up yet or the kernel is short of memory, the frame is lost, as on a real wire.
        with suppress(OSError):
            os.write(device, data)

    return deliver


def _ask_for_real_time() -> bool:
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(10))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()

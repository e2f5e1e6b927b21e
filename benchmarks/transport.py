"""Transport: throughput of frames over a link with mutual TLS, relative to gRPC and to the rate of a line.

On loopback it is compared with bare grpc.aio over the same TLS, in alternating runs; over a shaped line of 100 Mbit/s
between two hosts of the WAN lab, with the line's rate. Frames are encoded, counted, confirmed and decoded.
In the last part, two hosts send frames of 1 MiB to one another at the same time, like neighbouring stages, over lines
of 20 and 100 Mbit/s. The comparison is a bare TCP connection in both directions at the same time, over the same line
and with the same congestion control.
"""

import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import ROOT, Row, Target, arguments, finish, say
from benchmarks.transport_ends import AUTHORITY, RECEIVER, SENDER
from ravnest.coordinator.access.admission import Admission
from ravnest.net.identity.certificates import certificate_pem
from ravnest.net.identity.identity import Identity
from ravnest.net.identity.node_identity import NodeIdentity
from tests.wan import Host, Lab, LabHost
from tests.wan import Path as LabPath
from tests.wan.traffic import connect

_MESSAGE_BYTES = 4 << 20
_LINE_MBPS = 100.0
_LINE_DELAYS_MS = (10.0, 30.0)
_LOOPBACK_TARGET = 0.8
_LINE_TARGET = 0.93
_BOTH_LINES = ((100.0, 50.0), (20.0, 100.0))
"""Mbit/s in each direction, and the round trip in ms."""
_BOTH_TARGET = 0.95
_BOTH_FRAME_BYTES = 1 << 20
_WARMUP_SECONDS = 4.0

On = Callable[[list[str]], list[str]]
"""Turns a command into one that runs on a given host."""


def main() -> int:
    given = arguments("transport", "Throughput of Ravnest's transport, relative to gRPC and to the rate of a line.")
    rows: list[Row] = []
    targets: list[Target] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make_nodes(folder)
        row = _loopback(folder, given.quick)
        rows.append(row)
        targets.append(Target("loopback, 4 MiB messages: of bare gRPC with TLS", float(row["ratio"]), _LOOPBACK_TARGET))  # type: ignore[arg-type]
        if reason := Lab.unavailable():
            say(f"the shaped line is left out: {reason}")
        else:
            for delay_ms in _LINE_DELAYS_MS:
                row = _line(folder, delay_ms, given.quick)
                rows.append(row)
                targets.append(Target(f"{row['case']}: of the line", float(row["ratio"]), _LINE_TARGET))  # type: ignore[arg-type]
            for mbps, rtt_ms in _BOTH_LINES:
                row = _both_ways(folder, mbps, rtt_ms, given.quick)
                rows.append(row)
                targets.append(Target(f"{row['case']}: of bare TCP", float(row["ratio"]), _BOTH_TARGET))  # type: ignore[arg-type]
    return finish("transport", given, rows, targets)


def _loopback(folder: Path, quick: bool) -> Row:
    messages, repetitions = (50, 3) if quick else (150, 9)
    pairs = []
    with _receiver("bare", folder, "127.0.0.1", list) as bare, _receiver("ravnest", folder, "127.0.0.1", list) as ours:
        for _ in range(repetitions):
            plain = _send("bare", folder, f"127.0.0.1:{bare}", messages, list)
            link = _send("ravnest", folder, f"127.0.0.1:{ours}", messages, list)
            pairs.append((plain, link))
            say(f"loopback: bare {plain / 1e6:,.0f} MB/s, Ravnest {link / 1e6:,.0f} MB/s, ratio {link / plain:.2f}")
    return {
        "case": "loopback, 4 MiB messages",
        "bare_megabytes_per_second": statistics.median(plain for plain, _ in pairs) / 1e6,
        "ravnest_megabytes_per_second": statistics.median(link for _, link in pairs) / 1e6,
        "ratio": statistics.median(link / plain for plain, link in pairs),
    }


def _line(folder: Path, delay_ms: float, quick: bool) -> Row:
    messages = 10 if quick else 40
    hosts = [Host("near", up_mbps=_LINE_MBPS), Host("far", down_mbps=_LINE_MBPS)]
    with Lab(hosts, default=LabPath(delay_ms=delay_ms)) as lab:
        near, far = lab.host("near"), lab.host("far")
        with _receiver("bare", folder, far.address, far.command) as bare:
            plain = _send("bare", folder, f"{far.address}:{bare}", messages, near.command)
        with _receiver("ravnest", folder, far.address, far.command) as ours:
            link = _send("ravnest", folder, f"{far.address}:{ours}", messages, near.command)
    ratio = link * 8 / (_LINE_MBPS * 1e6)
    say(f"line with {delay_ms:g} ms each way: bare {plain / 1e6:.2f} MB/s, Ravnest {link / 1e6:.2f} MB/s, {ratio:.3f}")
    return {
        "case": f"{_LINE_MBPS:g} Mbit/s, {2 * delay_ms:g} ms round trip",
        "bare_megabytes_per_second": plain / 1e6,
        "ravnest_megabytes_per_second": link / 1e6,
        "ratio": ratio,
    }


def _both_ways(folder: Path, mbps: float, rtt_ms: float, quick: bool) -> Row:
    seconds = 8 if quick else 20
    hosts = [Host(name, up_mbps=mbps, down_mbps=mbps) for name in ("near", "far")]
    with Lab(hosts, default=LabPath(delay_ms=rtt_ms / 2)) as lab:
        near, far = lab.host("near"), lab.host("far")
        tcp = _bare_tcp(near, far, seconds)
        with _receiver("both", folder, far.address, far.command) as port:
            ends = [sys.executable, "-m", "benchmarks.transport_ends", "send", "both", str(folder)]
            done = subprocess.run(
                near.command([*ends, f"{far.address}:{port}", str(seconds), str(_BOTH_FRAME_BYTES)]),
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                check=True,
            )
    link = min(float(rate) for rate in done.stdout.split())
    share, bare = (rate * 8 / (mbps * 1e6) for rate in (link, tcp))
    say(f"both ways at {mbps:g} Mbit/s and {rtt_ms:g} ms: bare TCP {bare:.3f} of the line, Ravnest {share:.3f}")
    return {
        "case": f"both ways, {mbps:g} Mbit/s, {rtt_ms:g} ms round trip",
        "tcp_megabytes_per_second": tcp / 1e6,
        "ravnest_megabytes_per_second": link / 1e6,
        "line_share": share,
        "ratio": link / tcp,
    }


def _bare_tcp(near: LabHost, far: LabHost, seconds: float) -> float:
    """Received bytes per second of one TCP connection at its slower end, while both ends send."""
    ends = connect(near, far, timeout_seconds=10)
    block = bytes(1 << 18)
    rates = []

    def send(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                end.sendall(block)

    def receive(end: socket.socket) -> None:
        taken = bytearray(1 << 20)
        began, count = time.monotonic() + _WARMUP_SECONDS, 0
        while (now := time.monotonic()) < began + seconds:
            size = end.recv_into(taken)
            count += size if now >= began else 0
        rates.append(count / (time.monotonic() - began))

    sending = [threading.Thread(target=send, args=(end,)) for end in ends]
    receiving = [threading.Thread(target=receive, args=(end,)) for end in ends]
    for thread in (*sending, *receiving):
        thread.start()
    for thread in receiving:
        thread.join()
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    for thread in sending:
        thread.join()
    for end in ends:
        end.close()
    return min(rates)


def _make_nodes(folder: Path) -> None:
    """Two nodes of a swarm, with their keys in the folder."""
    admission = Admission.in_memory()
    (folder / AUTHORITY).write_bytes(certificate_pem(admission.authority.certificate))
    for name in (SENDER, RECEIVER):
        node = NodeIdentity.open(folder / name)
        identity = Identity("invite", admission.invite("127.0.0.1", 1).token.id)
        node.adopt(admission.join(identity, node.request(), name).certificate, admission.authority.certificate)


@contextmanager
def _receiver(kind: str, folder: Path, host: str, on: On) -> Iterator[int]:
    """The port of a running receiver."""
    command = on([sys.executable, "-m", "benchmarks.transport_ends", "receive", kind, str(folder), host])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def _send(kind: str, folder: Path, address: str, messages: int, on: On) -> float:
    """Received bytes per second."""
    ends = [sys.executable, "-m", "benchmarks.transport_ends", "send", kind, str(folder), address]
    done = subprocess.run(
        on([*ends, str(messages), str(_MESSAGE_BYTES)]), stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True
    )
    return float(done.stdout)


if __name__ == "__main__":
    sys.exit(main())

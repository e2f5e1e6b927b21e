"""The lab itself: real namespaces, real TCP. Bounds on times follow from the settings, not from the machine's load."""

import hashlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path as FilePath

import pytest

from tests.wan import Host, Lab, LabHost, Path, namespaces, traffic
from tests.wan.needs import need_lab

ROOT = FilePath(__file__).resolve().parents[2]

OWNER = """
import subprocess, sys
from tests.wan import Host, Lab
with Lab([Host("a"), Host("b")]) as lab:
    grandchild = ["sh", "-c", "sleep 1000 & echo $!; wait"]
    process = lab.host("a").popen(grandchild, stdout=subprocess.PIPE, text=True)
    print(lab.name, lab.switch_pid, process.pid, process.stdout.readline().strip(), flush=True)
    process.wait()
"""


@pytest.fixture(autouse=True)
def lab_possible() -> None:
    need_lab()


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab([Host("a"), Host("b")]) as lab:
        yield lab


def bound(host: LabHost) -> socket.socket:
    """A socket for datagrams with a timeout that is long enough for any machine."""
    it = host.open_socket(socket.SOCK_DGRAM)
    it.bind((host.address, 0))
    it.settimeout(10)
    return it


def left_of(lab: str) -> list[str]:
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if name.startswith(lab)] + list(map(str, namespaces.RUNNING.glob(lab)))


def await_end(*pids: int) -> None:
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([descriptor], [], [], 30)[0], f"process {pid} lives on"
        os.close(descriptor)


def test_a_round_trip_takes_both_delays() -> None:
    with Lab([Host("a"), Host("b")], Path(delay_ms=30), {("a", "b"): Path(delay_ms=10)}) as lab:
        times = traffic.ping(lab.host("a"), lab.host("b"), 10)
        assert len(times) == 10
        assert min(times) >= 0.040
        assert min(times) < 0.060
        lab.pair("a", "b").set(delay_ms=100)
        assert min(traffic.ping(lab.host("b"), lab.host("a"), 3)) >= 0.200


def test_a_connection_gets_its_line_s_rate_and_no_more() -> None:
    line = Host("a", up_mbps=100, down_mbps=100)
    with Lab([line, Host("b")], Path(delay_ms=25)) as lab:
        result = traffic.throughput(lab.host("a"), lab.host("b"), 2)
    assert 40 < result.mbps < 100


def test_a_home_line_is_slower_up_than_down() -> None:
    with Lab([Host("home", up_mbps=10, down_mbps=60), Host("server")], Path(delay_ms=5)) as lab:
        home, server = lab.host("home"), lab.host("server")
        up = traffic.throughput(home, server, 1)
        down = traffic.throughput(server, home, 1)
        assert up.mbps < 10
        assert 20 < down.mbps < 60


def test_a_path_slows_down_and_recovers_while_it_runs(lab: Lab) -> None:
    a, b = lab.host("a"), lab.host("b")
    lab.path("a", "b").set(rate_mbps=5, delay_ms=5)
    assert traffic.throughput(a, b, 0.7).mbps < 5
    lab.path("a", "b").set(rate_mbps=50)
    assert 15 < traffic.throughput(a, b, 0.7).mbps < 50
    lab.path("a", "b").set(rate_mbps=None)
    assert traffic.throughput(a, b, 0.7).mbps > 50
    b.set(down_mbps=5)
    assert traffic.throughput(a, b, 0.7).mbps < 5


def test_datagrams_are_lost_at_the_rate_that_was_set(lab: Lab) -> None:
    lab.path("a", "b").set(loss=0.2)
    with bound(lab.host("a")) as a, bound(lab.host("b")) as b:
        for _ in range(200):
            a.sendto(b"x", b.getsockname())
        a.settimeout(0.05)
        arrived = 0

        def count() -> None:
            nonlocal arrived
            while b.recv(10) == b"x":
                arrived += 1
            b.sendto(b"seen", a.getsockname())

        counting = threading.Thread(target=count)
        counting.start()
        # Paths keep the order, so once an "end" has arrived, every datagram before it has arrived or was lost.
        while counting.is_alive():
            a.sendto(b"end", b.getsockname())
            try:
                a.recv(10)
            except TimeoutError:
                continue
            counting.join()
    assert 140 < arrived < 180
    assert lab.path("a", "b").counters.lost_packets >= 200 - arrived
    assert lab.path("b", "a").counters.lost_packets == 0


def test_a_slow_and_lossy_path_changes_no_byte() -> None:
    content = random.Random(3).randbytes(1_500_000)
    with Lab([Host("a", up_mbps=40), Host("b", down_mbps=60)], Path(delay_ms=2, loss=0.01)) as lab:
        near, far = traffic.connect(lab.host("a"), lab.host("b"), 20)
        with near, far:

            def send() -> None:
                near.sendall(content)
                near.shutdown(socket.SHUT_WR)

            sending = threading.Thread(target=send)
            sending.start()
            received = hashlib.sha256()
            while block := far.recv(1 << 16):
                received.update(block)
            sending.join()
        assert received.digest() == hashlib.sha256(content).digest()
        assert lab.path("a", "b").counters.lost_packets > 0
        assert lab.host("a").counters.sent_packets > 1000


def test_a_path_can_be_cut_one_way(lab: Lab) -> None:
    with bound(lab.host("a")) as a, bound(lab.host("b")) as b:
        lab.path("a", "b").cut()
        a.sendto(b"lost", b.getsockname())
        b.sendto(b"arrives", a.getsockname())
        assert a.recv(10) == b"arrives"
        assert lab.path("a", "b").counters.cut_packets == 1
        lab.path("a", "b").heal()
        a.sendto(b"healed", b.getsockname())
        assert b.recv(10) == b"healed"


def test_a_connection_survives_a_cut(lab: Lab) -> None:
    near, far = traffic.connect(lab.host("a"), lab.host("b"), 20)
    with near, far:
        lab.cut("a", "b")
        near.sendall(b"patience")
        far.settimeout(0.3)
        with pytest.raises(TimeoutError):
            far.recv(10)
        far.settimeout(20)
        lab.heal("a", "b")
        assert far.recv(10) == b"patience"


def test_an_unplugged_host_receives_nothing_until_it_is_plugged_in() -> None:
    with Lab([Host("a"), Host("b"), Host("c")]) as lab, bound(lab.host("b")) as b, bound(lab.host("c")) as c:
        lab.host("a").unplug()
        with pytest.raises(TimeoutError):
            traffic.connect(lab.host("a"), lab.host("b"), 0.2)
        with pytest.raises(TimeoutError):
            traffic.connect(lab.host("c"), lab.host("a"), 0.2)
        b.sendto(b"still here", c.getsockname())
        assert c.recv(10) == b"still here"
        lab.host("a").plug_in()
        near, far = traffic.connect(lab.host("a"), lab.host("b"), 20)
        near.close()
        far.close()


def test_a_host_behind_a_nat_can_dial_but_not_be_dialled() -> None:
    with Lab([Host("home", nat=True), Host("server")]) as lab:
        home, server = lab.host("home"), lab.host("server")
        with pytest.raises(TimeoutError):
            traffic.connect(server, home, 0.3)
        near, far = traffic.connect(home, server, 20)
        with near, far:
            far.sendall(b"reply")
            assert near.recv(10) == b"reply"
        assert home.counters.blocked_packets > 0
        assert len(traffic.ping(home, server, 3)) == 3
        home.allow_inbound()
        near, far = traffic.connect(server, home, 20)
        near.close()
        far.close()


def test_connections_that_are_open_when_inbound_is_blocked_stay(lab: Lab) -> None:
    a, b = lab.host("a"), lab.host("b")
    near, far = traffic.connect(b, a, 20)
    with near, far:
        a.block_inbound()
        near.sendall(b"to a")
        assert far.recv(10) == b"to a"
        with pytest.raises(TimeoutError):
            traffic.connect(b, a, 0.3)


def test_every_byte_is_counted(lab: Lab) -> None:
    with bound(lab.host("a")) as a, bound(lab.host("b")) as b:
        for _ in range(10):
            a.sendto(bytes(972), b.getsockname())
            b.recv(2000)
    sent, received = lab.host("a").counters, lab.host("b").counters
    assert (sent.sent_bytes, sent.sent_packets, sent.received_bytes) == (10_000, 10, 0)
    assert (received.received_bytes, received.received_packets, received.sent_bytes) == (10_000, 10, 0)
    assert lab.path("a", "b").counters.passed_bytes == 10_000


def test_programs_run_on_their_host_with_the_caller_s_environment(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREETING", "hello from")
    script = ["sh", "-c", "echo $GREETING; ip -4 -oneline address show eth0"]
    out = lab.host("b").run(script, capture_output=True, text=True, check=True).stdout
    assert "hello from" in out
    assert lab.host("b").address in out
    assert lab.host("b").popen(["true"]).wait() == 0


def test_two_labs_do_not_affect_each_other(lab: Lab) -> None:
    with Lab([Host("a"), Host("b")]) as other:
        assert other.host("a").address != lab.host("a").address
        other.cut("a", "b")
        assert len(traffic.ping(lab.host("a"), lab.host("b"), 2)) == 2
    assert len(traffic.ping(lab.host("a"), lab.host("b"), 2)) == 2


def test_a_lab_leaves_nothing_behind_when_it_ends_with_an_error() -> None:
    process: subprocess.Popen[bytes] | None = None
    name = ""
    with pytest.raises(ZeroDivisionError), Lab([Host("a"), Host("b")]) as lab:
        process, name = lab.host("a").popen(["sleep", "1000"]), lab.name
        assert left_of(name)
        raise ZeroDivisionError
    assert process is not None
    assert process.returncode == -signal.SIGKILL
    assert left_of(name) == []


@pytest.mark.parametrize("end", ["interrupted", "killed", "killed with its switch"])
def test_a_lab_whose_owner_ends_leaves_nothing_behind(end: str) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        name, *pids = owner.stdout.readline().split()
        switch, child, grandchild = map(int, pids)
        if end == "killed with its switch":
            os.kill(switch, signal.SIGKILL)
        owner.send_signal(signal.SIGINT if end == "interrupted" else signal.SIGKILL)
        owner.wait()
    await_end(switch)
    if end == "killed with its switch":
        with Lab([Host("a")]):
            pass
    await_end(child, grandchild)
    assert left_of(name) == []


def test_the_switch_refuses_invalid_requests_and_continues(lab: Lab) -> None:
    with pytest.raises(ValueError, match="fraction"):
        lab.path("a", "b").set(loss=7)
    with pytest.raises(ValueError, match="no host z"):
        lab.cut("a", "z")
    with pytest.raises(ValueError, match="does not know"):
        lab.ask("dance")
    assert len(traffic.ping(lab.host("a"), lab.host("b"), 2)) == 2


def test_a_user_can_create_a_lab_and_change_it_from_another_terminal() -> None:
    def wan(*arguments: str) -> str:
        command = [sys.executable, "-m", "tests.wan", *arguments]
        return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout

    command = [sys.executable, "-u", "-m", "tests.wan", "up", "--host", "a:20/100:nat", "--host", "b", "--delay", "3"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        name = owner.stdout.readline().split()[1]
        while "Open a shell" not in owner.stdout.readline():
            pass
        wan("set", "a", "b", "--lab", name, "--delay", "7", "--one-way")
        wan("host", "b", "--lab", name, "--up", "5")
        status = wan("status", "--lab", name)
        assert "NAT" in status
        assert [float(line.split()[3]) for line in status.splitlines() if "->" in line] == [7, 3]
        assert "eth0" in wan("shell", "--lab", name, "a", "ip", "address")
        owner.send_signal(signal.SIGINT)
    assert owner.returncode == 130
    assert left_of(name) == []


def test_without_iproute2_the_reason_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    reason = namespaces.unavailable()
    assert reason is not None
    assert "apt-get install iproute2" in reason


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_missing_lab_skips_tests_but_fails_them_in_ci(
    ci: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(Lab, "unavailable", lambda: "no namespaces here")
    with pytest.raises(outcome, match="no namespaces here"):
        need_lab()

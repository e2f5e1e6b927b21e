"""Lines, losses, paths and NATs in virtual time: exact, and without a network."""

import random
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path as FilePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wan.network import Network
from tests.wan.packets import TCP, UDP, VIRTIO_BYTES, Frame, Nat, parse
from tests.wan.shaping import Agenda, Line, chunk_bytes, default_queue_bytes, survivors, transmission_seconds
from tests.wan.topology import Host, Path, Topology, read_topology

A, B, C = (socket.inet_aton(f"10.0.0.{number}") for number in (1, 2, 3))
SYN, ACK = 0x02, 0x10

rates = st.floats(0.5, 2000)
offers = st.lists(st.tuples(st.floats(0, 0.1), st.integers(21, 9000)), min_size=1, max_size=30)
"""Frames by their size and the time since the previous one."""


def packet(protocol: int, source: bytes, target: bytes, transport: bytes, virtio: bytes = bytes(VIRTIO_BYTES)) -> bytes:
    length = 20 + len(transport)
    return virtio + struct.pack("!BBHHHBBH4s4s", 0x45, 0, length, 7, 0, 64, protocol, 0, source, target) + transport


def datagram(source: bytes, target: bytes, ports: tuple[int, int] = (1, 2), payload: bytes = b"") -> bytes:
    return packet(UDP, source, target, struct.pack("!HHHH", *ports, 8 + len(payload), 0) + payload)


def tcp(source: bytes, target: bytes, flags: int = ACK, payload: bytes = b"", segment_bytes: int = 0) -> bytes:
    virtio = struct.pack("=BBHHHH", 1, 1, 40, segment_bytes, 20, 16) if segment_bytes else bytes(VIRTIO_BYTES)
    return packet(TCP, source, target, struct.pack("!HHIIBBHHH", 1, 2, 1000, 0, 0x50, flags, 0, 0, 0) + payload, virtio)


def parsed(data: bytes) -> Frame:
    frame = parse(data)
    assert frame is not None
    return frame


def burst(segments: int, segment_bytes: int = 100, last_bytes: int = 100) -> Frame:
    payload = random.Random(segments).randbytes((segments - 1) * segment_bytes + last_bytes)
    return parsed(tcp(A, B, payload=payload, segment_bytes=segment_bytes))


@dataclass
class Recorder:
    """Receiver at the end of a line."""

    came: list[tuple[float, Frame]] = field(default_factory=list)

    def __call__(self, now: float, frame: Frame) -> None:
        self.came.append((now, frame))


def through_line(
    rate_mbps: float, queue_bytes: int, sizes: list[tuple[float, int]], run_each_time: bool
) -> tuple[Recorder, Line, list[float]]:
    agenda, recorder = Agenda(), Recorder()
    line = Line(agenda, recorder)
    line.set(rate_mbps, queue_bytes)
    now = 0.0
    offered = []
    for gap, size in sizes:
        now += gap
        if run_each_time:
            while (due := agenda.due()) is not None and due <= now:
                agenda.run(due)
        agenda.run(now)
        line.offer(now, Frame(b"", B, size))
        assert line.queued_bytes <= max(queue_bytes, max(size for _, size in sizes))
        offered.append(now)
    agenda.run(now + 1e6)
    return recorder, line, offered


@given(rates, st.integers(1, 100_000), offers)
def test_a_line_is_never_faster_than_its_rate_and_keeps_the_order(
    rate_mbps: float, queue_bytes: int, sizes: list[tuple[float, int]]
) -> None:
    recorder, line, offered = through_line(rate_mbps, queue_bytes, sizes, run_each_time=True)
    assert len(recorder.came) + line.dropped_packets == len(sizes)
    free_at = 0.0
    waiting = iter(zip(offered, sizes, strict=True))
    for moment, frame in recorder.came:
        start = next(at for at, (_, size) in waiting if size == frame.size_bytes)
        assert moment >= max(free_at, start) + transmission_seconds(frame.size_bytes, rate_mbps) - 1e-9
        free_at = moment


@given(rates, st.integers(1, 100_000), offers)
def test_a_switch_that_wakes_late_delays_nothing_else(
    rate_mbps: float, queue_bytes: int, sizes: list[tuple[float, int]]
) -> None:
    punctual = through_line(rate_mbps, queue_bytes, sizes, run_each_time=True)[0]
    late = through_line(rate_mbps, queue_bytes, sizes, run_each_time=False)[0]
    assert [(moment, frame.size_bytes) for moment, frame in late.came] == [
        (moment, frame.size_bytes) for moment, frame in punctual.came
    ]


def test_a_full_queue_accepts_the_segments_that_fit_and_drops_the_rest() -> None:
    agenda, recorder = Agenda(), Recorder()
    line = Line(agenda, recorder)
    line.set(1.0, 1000)
    line.offer(0.0, Frame(b"", B, 500))
    line.offer(0.0, burst(5))
    assert line.dropped_packets == 2
    agenda.run(10.0)
    assert [frame.segments for _, frame in recorder.came] == [1, 3]


def test_a_line_whose_limit_is_removed_releases_its_queue() -> None:
    agenda, recorder = Agenda(), Recorder()
    line = Line(agenda, recorder)
    line.set(0.008, 10_000)
    for _ in range(3):
        line.offer(0.0, Frame(b"", B, 1000))
    line.set(None, None)
    agenda.run(1.5)
    assert [moment for moment, _ in recorder.came] == pytest.approx([1.0, 1.0, 1.0])


def test_queues_hold_a_tenth_of_a_second_but_never_less_than_64_kib() -> None:
    assert default_queue_bytes(100) == 1_250_000
    assert default_queue_bytes(1) == 65536


@given(st.integers(2, 44), st.integers(1, 100), st.data())
def test_the_parts_of_a_burst_equal_the_packets_of_the_sender(
    segments: int, last_bytes: int, data: st.DataObject
) -> None:
    whole = burst(segments, last_bytes=last_bytes)
    middle = data.draw(st.integers(0, segments))
    parts = [whole.part(first, last) for first, last in ((0, middle), (middle, segments)) if first < last]
    assert sum(part.size_bytes for part in parts) == whole.size_bytes
    assert sum(part.segments for part in parts) == segments
    assert b"".join(part.data[VIRTIO_BYTES + 40 :] for part in parts) == whole.data[VIRTIO_BYTES + 40 :]
    at = 1000
    for part in parts:
        ip = part.data[VIRTIO_BYTES:]
        again = parsed(part.data)
        assert (again.segments, again.size_bytes) == (part.segments, part.size_bytes)
        assert struct.unpack_from("!H", ip, 2)[0] == len(ip)
        assert struct.unpack_from("!I", ip, 24)[0] == at
        at += len(ip) - 40
        if len(parts) > 1:
            assert _ones_complement(ip[:20]) == 0xFFFF
            pseudo = ip[12:20] + struct.pack("!HH", TCP, len(ip) - 20)
            assert struct.unpack_from("!H", ip, 36)[0] == _ones_complement(pseudo)


def test_only_the_last_part_ends_the_stream() -> None:
    fin_psh = 0x09
    whole = parsed(tcp(A, B, ACK | fin_psh, bytes(300), segment_bytes=100))
    flags = [part.data[VIRTIO_BYTES + 20 + 13] for part in whole.chunks(150)]
    assert flags == [ACK, ACK, ACK | fin_psh]


@given(rates, st.integers(2, 44))
def test_a_chunk_takes_a_millisecond_or_is_two_segments(rate_mbps: float, segments: int) -> None:
    whole = burst(segments, segment_bytes=1448, last_bytes=700)
    chunks = list(whole.chunks(chunk_bytes(None, rate_mbps)))
    assert sum(chunk.segments for chunk in chunks) == segments
    assert all(chunk.segments <= 2 or transmission_seconds(chunk.size_bytes, rate_mbps) <= 0.001 for chunk in chunks)
    assert chunk_bytes(None, None) > 10**9


def test_loss_hits_segments_at_its_rate() -> None:
    chance = random.Random(1)
    left = sum(rest.segments for _ in range(1000) for rest in survivors(burst(20), 0.1, chance))
    assert 0.88 < left / 20_000 < 0.92
    assert list(survivors(burst(20), 1.0, chance)) == []
    whole = burst(20)
    assert list(survivors(whole, 0.0, chance)) == [whole]


class World:
    """Three hosts in virtual time; records the frames that they receive, with their times."""

    def __init__(self, topology: Topology) -> None:
        self.now = 0.0
        self.came: dict[str, list[tuple[float, bytes]]] = {host.name: [] for host in topology.hosts}
        addresses = dict(zip("abc", (A, B, C), strict=True))
        self.network = Network(topology, addresses, {name: self._receiver(name) for name in self.came})

    def _receiver(self, name: str) -> Callable[[bytes], None]:
        return lambda data: self.came[name].append((self.now, data))

    def advance(self, until: float) -> None:
        while (due := self.network.due()) is not None and due <= until:
            self.now = max(self.now, due)
            self.network.run(self.now)
        self.now = until
        self.network.run(until)

    def send(self, source: str, data: bytes) -> None:
        self.network.accept(self.now, source, data)


def world(*hosts: Host, path: Path | None = None) -> World:
    named = {host.name: host for host in hosts}
    return World(Topology(tuple(named.get(name, Host(name)) for name in "abc"), path or Path()))


any_path = st.builds(
    Path,
    delay_ms=st.sampled_from([0.0, 5.0, 200.0]),
    loss=st.sampled_from([0.0, 0.3]),
    rate_mbps=st.none() | rates,
    queue_bytes=st.none() | st.integers(1000, 100_000),
)
lines = st.none() | rates


def test_frames_within_a_hundredth_of_the_delay_arrive_together() -> None:
    there = world(path=Path(delay_ms=50))
    for moment in (0.0, 0.0004, 0.0006):
        there.advance(moment)
        there.send("a", datagram(A, B, payload=bytes(100)))
    there.advance(1.0)
    assert [moment for moment, _ in there.came["b"]] == pytest.approx([0.0505, 0.0505, 0.0511])


@given(any_path, any_path, lines, lines, st.lists(st.tuples(st.floats(0, 0.05), st.sampled_from("ab")), max_size=30))
def test_frames_to_one_host_arrive_in_order_never_early_and_all_are_counted(
    from_a: Path, from_b: Path, up: float | None, down: float | None, sends: list[tuple[float, str]]
) -> None:
    hosts = (Host("a", up_mbps=up), Host("b"), Host("c", down_mbps=down))
    paths = {("a", "c"): from_a, ("b", "c"): from_b}
    there = World(Topology(hosts, Path(), paths))
    sent_at: dict[int, float] = {}
    for number, (gap, source) in enumerate(sends):
        there.advance(there.now + gap)
        sent_at[number] = there.now
        address, size = (A, 1400) if source == "a" else (B, 90)
        there.send(source, datagram(address, C, payload=number.to_bytes(4, "big") + bytes(size)))
    there.advance(there.now + 1e4)

    numbers = []
    for moment, data in there.came["c"]:
        number = int.from_bytes(data[VIRTIO_BYTES + 28 : VIRTIO_BYTES + 32], "big")
        source = sends[number][1]
        size = len(data) - VIRTIO_BYTES
        path = paths[source, "c"]
        passed = [path.rate_mbps, down] + ([up] if source == "a" else [])
        least = path.delay_ms / 1e3 + sum(transmission_seconds(size, rate) for rate in passed if rate is not None)
        assert moment >= sent_at[number] + least - 1e-9
        if len(sends) == 1:
            # A frame waits at most a hundredth of the delay, for others that arrive with it.
            assert moment <= sent_at[number] + least + path.delay_ms / 1e5 + 1e-9
        numbers.append((source, number))
    for source in "ab":
        mine = [number for whose, number in numbers if whose == source]
        assert mine == sorted(set(mine))

    status = there.network.status()
    gone = status["hosts"]["a"]["counters"]["uplink_dropped_packets"]
    gone += status["hosts"]["c"]["counters"]["downlink_dropped_packets"]
    gone += sum(path["counters"]["lost_packets"] + path["counters"]["dropped_packets"] for path in status["paths"])
    assert len(numbers) + gone == len(sends)
    assert status["hosts"]["c"]["counters"]["received_packets"] == len(numbers)


def test_the_switch_is_woken_exactly_when_a_frame_is_to_be_delivered() -> None:
    there = world(Host("a", up_mbps=8), Host("b", down_mbps=4), path=Path(delay_ms=100))
    for _ in range(3):
        there.send("a", datagram(A, B, payload=bytes(972)))
    there.advance(10.0)
    # 1000 bytes take 1 ms up and 2 ms down; the second and third frame wait for the downlink.
    assert [moment for moment, _ in there.came["b"]] == pytest.approx([0.103, 0.105, 0.107])


def test_a_shortened_delay_does_not_let_frames_overtake() -> None:
    there = world(path=Path(delay_ms=100))
    there.send("a", datagram(A, B, payload=b"first"))
    there.network.change_path("a", "b", {"delay_ms": 1})
    there.send("a", datagram(A, B, payload=b"second"))
    there.advance(1.0)
    assert [data[-6:] for _, data in there.came["b"]] == [b"\0first", b"second"]


def test_frames_in_transit_when_a_path_is_cut_do_not_arrive() -> None:
    there = world(path=Path(delay_ms=100))
    there.send("a", datagram(A, B, payload=b"too late"))
    there.advance(0.05)
    there.network.cut("a", "b", True)
    there.send("b", datagram(B, A, payload=b"the other way is open"))
    there.advance(1.0)
    there.network.cut("a", "b", False)
    there.send("a", datagram(A, B, payload=b"healed"))
    there.advance(2.0)
    assert [data[-6:] for _, data in there.came["b"]] == [b"healed"]
    assert len(there.came["a"]) == 1


def test_a_large_burst_crosses_a_slow_line_in_small_pieces() -> None:
    there = world(Host("a", up_mbps=12))
    there.send("a", tcp(A, B, payload=bytes(14480), segment_bytes=1448))
    there.advance(1.0)
    assert [len(data) for _, data in there.came["b"]] == [VIRTIO_BYTES + 40 + 2 * 1448] * 5
    assert there.network.status()["hosts"]["b"]["counters"]["received_packets"] == 10


def test_a_nat_refuses_new_connections_and_passes_replies() -> None:
    nat = Nat()
    assert not nat.admits(parsed(tcp(B, A, SYN)))
    assert nat.admits(parsed(tcp(B, A, SYN | ACK)))
    assert nat.admits(parsed(tcp(B, A, ACK)))
    assert not nat.admits(parsed(datagram(B, A, (9, 5))))
    nat.outbound(parsed(datagram(A, B, (5, 9))))
    assert nat.admits(parsed(datagram(B, A, (9, 5))))
    assert not nat.admits(parsed(datagram(B, A, (8, 5))))
    assert not nat.admits(parsed(datagram(C, A, (9, 5))))


@pytest.mark.parametrize("data", [b"", bytes(12), bytes(60), bytes(VIRTIO_BYTES) + b"\x60" + bytes(60)])
def test_data_that_is_not_an_ipv4_packet_is_dropped(data: bytes) -> None:
    there = world()
    there.send("a", data)
    there.send("a", datagram(A, socket.inet_aton("192.0.2.1")))
    assert there.network.due() is None
    assert not any(there.came.values())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda: Host("a b"), "host name"),
        (lambda: Host("a", up_mbps=0), "up_mbps of host a must be more than 0"),
        (lambda: Path(loss=1.5), "fraction from 0 to 1"),
        (lambda: Path(delay_ms=-1), "delay_ms"),
        (lambda: Topology((Host("a"), Host("a"))), "names of the hosts"),
        (lambda: Topology((Host("a"),), paths={("a", "z"): Path()}), "no path from a to z"),
        (lambda: world().network.change_path("a", "z", {}), "no host z"),
        (lambda: world().network.change_path("a", "b", {"speed": 1}), "cannot be set"),
        (lambda: world().network.change_host("a", {"name": "x"}), "keeps its name"),
    ],
)
def test_invalid_settings_are_refused_with_the_reason(change: Callable[[], object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        change()


def test_a_file_describes_a_lab(tmp_path: FilePath) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(
        """
        [path]
        delay_ms = 20
        [hosts.a]
        up_mbps = 20
        nat = true
        [hosts.b]
        [hosts.c]
        [[paths]]
        between = ["a", "b"]
        loss = 0.01
        [[paths]]
        between = ["b", "c"]
        both_ways = false
        rate_mbps = 5
        """
    )
    topology = read_topology(file)
    assert topology.hosts == (Host("a", up_mbps=20, nat=True), Host("b"), Host("c"))
    assert topology.default == Path(delay_ms=20)
    lossy = Path(delay_ms=20, loss=0.01)
    assert topology.paths == {("a", "b"): lossy, ("b", "a"): lossy, ("b", "c"): Path(delay_ms=20, rate_mbps=5)}
    file.write_text("[hosts.a]\nspeed = 3\n")
    with pytest.raises(ValueError, match=r"lab\.toml does not describe a lab: .*speed"):
        read_topology(file)


def _ones_complement(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total

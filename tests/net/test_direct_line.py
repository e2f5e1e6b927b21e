"""Direct lines over real sockets and TLS: pieces arrive unchanged, and only from nodes that may send."""

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch

from ravnest.coordinator.access.admission import Admission
from ravnest.errors import PeerError, RunError
from ravnest.net import direct_line
from ravnest.net.direct_line import MAGIC, PIECE_BYTES, DirectLine, connect_direct, dial_direct
from ravnest.net.direct_server import DirectLimits, DirectServer
from ravnest.net.frames.frames import RingPlace
from ravnest.net.identity.identity import Identity
from ravnest.net.identity.node_identity import NodeIdentity, joiner_keys
from ravnest.net.pacing.budget import StateBudget, Ticket
from ravnest.net.pacing.state_rate import StateKind

SECONDS = 20.0
LIMITS = DirectLimits()
PLACE = RingPlace(7, 3, attempt=2, hop=1, segment=4, chunk=5)

Received = tuple[int, RingPlace, torch.Tensor]


def swarm(*names: str, admission: Admission | None = None) -> dict[str, NodeIdentity]:
    admission = admission or Admission.in_memory()
    nodes = {}
    for name in names:
        node = nodes[name] = NodeIdentity.new()
        identity = Identity("invite", admission.invite("127.0.0.1", 1).token.id)
        node.adopt(admission.join(identity, node.request(), name).certificate, admission.authority.certificate)
    return nodes


@dataclass
class Listening:
    """The called side: everything that comes, over whatever line, in order; and how each line ended."""

    pieces: "queue.Queue[Received]" = field(default_factory=queue.Queue)
    lines: "queue.Queue[DirectLine]" = field(default_factory=queue.Queue)
    ends: "queue.Queue[str]" = field(default_factory=queue.Queue)
    address: str = ""

    def take(self, line: DirectLine) -> None:
        self.lines.put(line)
        try:
            while (piece := line.receive()) is not None:
                self.pieces.put(piece)
            self.ends.put("")
        except PeerError as error:
            self.ends.put(str(error))


@contextlib.contextmanager
def listening(node: NodeIdentity, *may_send: str, limits: DirectLimits = LIMITS) -> Iterator[Listening]:
    here = Listening()
    server = DirectServer(node, lambda node_id: node_id in may_send, here.take, limits)
    here.address = f"127.0.0.1:{server.start('127.0.0.1', 0)}"
    try:
        yield here
    finally:
        server.stop()


def is_hung_up(connection: socket.socket) -> bool:
    """Waits for the end of a connection."""
    connection.settimeout(SECONDS)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def until_broken(line: DirectLine) -> None:
    """Sends until the line says that it is no more; hangs, and so fails, where it never does."""
    with pytest.raises(PeerError):
        while True:
            line.send(1, PLACE, torch.zeros(1 << 20, dtype=torch.uint8))


@pytest.mark.parametrize("size", [0, 1, 1000, PIECE_BYTES])
@pytest.mark.parametrize("place", [PLACE, RingPlace(2**63, 2**32 - 1, chunk=9, donation=True, last=True)])
def test_a_piece_arrives_bit_for_bit_with_its_place_and_generation(size: int, place: RingPlace) -> None:
    nodes = swarm("a", "b")
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    with listening(nodes["b"], "a") as here, contextlib.closing(dial_direct(here.address, "b", nodes["a"], 5)) as line:
        line.send(-3, place, data)
        generation, came, received = here.pieces.get(timeout=SECONDS)
        assert (generation, came) == (-3, place)
        assert received.dtype is torch.uint8 and torch.equal(received, data)
        assert here.lines.get().peer == "a" and line.peer == "b"


def test_a_piece_that_waits_for_its_turns_arrives_whole_and_in_the_sizes_that_the_line_takes() -> None:
    nodes = swarm("a", "b")
    data = torch.randint(0, 256, (500_000,), dtype=torch.uint8)
    turns: list[int] = []

    class Noted(StateBudget):
        def join(self, kind: StateKind, size_bytes: int, wake: Callable[[], None]) -> Ticket:
            assert kind == "round"
            turns.append(size_bytes)
            return super().join(kind, size_bytes, wake)

    budget = Noted()
    budget.measured(4e6)
    with listening(nodes["b"], "a") as here, contextlib.closing(dial_direct(here.address, "b", nodes["a"], 5)) as line:
        line.send(1, PLACE, data, budget.transfer("round"))
        _, _, received = here.pieces.get(timeout=SECONDS)
    assert torch.equal(received, data)
    assert len(turns) > 4 and max(turns) <= budget.piece_bytes == 100_000 and 500_000 <= sum(turns) < 500_100


def test_a_line_that_is_closed_does_not_wait_for_turns() -> None:
    nodes = swarm("a", "b")
    budget = StateBudget()
    budget.queued(1)
    with listening(nodes["b"], "a") as here:
        line = dial_direct(here.address, "b", nodes["a"], 5)
        line.close()
        with pytest.raises(PeerError, match="closed"):
            line.send(1, PLACE, torch.zeros(1 << 22, dtype=torch.uint8), budget.transfer("round"))


def test_a_piece_is_received_where_there_is_room_for_it_and_else_in_memory_that_is_used_again() -> None:
    nodes = swarm("a", "b")
    asked: list[tuple[int, RingPlace, int]] = []
    rooms = [torch.zeros(3, dtype=torch.uint8), None, None, torch.empty(0, dtype=torch.uint8)]
    found: queue.Queue[Received | None] = queue.Queue()

    def room(generation: int, place: RingPlace, size: int) -> torch.Tensor | None:
        asked.append((generation, place, size))
        return rooms[len(asked) - 1]

    def take(line: DirectLine) -> None:
        for _ in rooms:
            found.put(line.receive(room))

    server = DirectServer(nodes["b"], lambda _: True, take)
    address = f"127.0.0.1:{server.start('127.0.0.1', 0)}"
    with contextlib.closing(dial_direct(address, "b", nodes["a"], 5)) as line:
        for number, size in enumerate((3, 4, 2, 0)):
            line.send(9, RingPlace(1, 0, chunk=number), torch.full((size,), number + 1, dtype=torch.uint8))
        pieces = [found.get(timeout=SECONDS) for _ in rooms]
    server.stop()
    assert asked == [(9, RingPlace(1, 0, chunk=number), size) for number, size in enumerate((3, 4, 2, 0))]
    first, second, third, fourth = (piece[2] for piece in pieces if piece is not None)
    assert first is rooms[0] and first.tolist() == [1, 1, 1] and fourth is rooms[3]
    assert third.tolist() == [3, 3] and second.tolist() == [3, 3, 2, 2]


def test_many_pieces_arrive_in_order_though_the_line_is_closed_right_after_the_last() -> None:
    nodes = swarm("a", "b")
    pieces = [torch.full((n * 997 % 50_000,), n % 251, dtype=torch.uint8) for n in range(300)]
    with listening(nodes["b"], "a") as here:
        line = dial_direct(here.address, "b", nodes["a"], 5)
        for number, piece in enumerate(pieces):
            line.send(1, RingPlace(1, 0, chunk=number), piece)
        line.close()
        assert here.ends.get(timeout=SECONDS) == ""
        for number, piece in enumerate(pieces):
            _, place, data = here.pieces.get_nowait()
            assert place.chunk == number and torch.equal(data, piece)


def test_lines_of_several_nodes_run_side_by_side() -> None:
    nodes = swarm("a", "b", "c")
    with listening(nodes["b"], "a", "c") as here:
        lines = [dial_direct(here.address, "b", nodes[name], 5) for name in ("a", "c")]
        assert {here.lines.get(timeout=SECONDS).peer for _ in lines} == {"a", "c"}
        for number, line in enumerate(lines):
            line.send(1, RingPlace(1, number), torch.ones(10, dtype=torch.uint8))
        assert {here.pieces.get(timeout=SECONDS)[1].ring for _ in lines} == {0, 1}
        for line in lines:
            line.close()


def test_a_node_that_may_not_send_is_hung_up_on() -> None:
    nodes = swarm("a", "b")
    with listening(nodes["b"], "another-node") as here:
        line = dial_direct(here.address, "b", nodes["a"], 5)
        until_broken(line)
        assert here.lines.empty()


def test_a_node_of_another_swarm_is_refused_and_refuses() -> None:
    nodes, strangers = swarm("a", "b"), swarm("a", "b")
    with listening(nodes["b"], "a") as here, pytest.raises(PeerError, match="no direct line to b"):
        dial_direct(here.address, "b", strangers["a"], 5)
    # One that trusts the swarm, and shows a certificate of its own swarm.
    keys = replace(strangers["a"].tls_keys(), roots=nodes["a"].tls_keys().roots)
    with listening(nodes["b"], "a") as here:
        until_broken(DirectLine(connect_direct(here.address, "b", keys, 5), "b"))
        assert here.lines.empty()


def test_the_holder_of_an_invite_that_has_not_joined_is_refused() -> None:
    admission = Admission.in_memory()
    nodes = swarm("a", "b", admission=admission)
    keys = joiner_keys(admission.invite("127.0.0.1", 1).token, admission.authority.certificate)
    with listening(nodes["b"], "a") as here:
        until_broken(DirectLine(connect_direct(here.address, "b", keys, 5), "b"))
        assert here.lines.empty()


def test_a_dialler_that_expects_another_node_refuses() -> None:
    nodes = swarm("a", "b", "c")
    with listening(nodes["b"], "a") as here, pytest.raises(PeerError, match="no direct line to c"):
        dial_direct(here.address, "c", nodes["a"], 5)


def test_an_address_without_a_listener_or_an_answer_is_told_in_a_sentence() -> None:
    node = swarm("a")["a"]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(PeerError, match="no direct line to b"):
            dial_direct(address, "b", node, 0.2)
    with pytest.raises(PeerError, match="no direct line to b"):
        dial_direct(address, "b", node, 5)


def test_callers_that_are_silent_or_speak_no_tls_are_disconnected_and_delay_no_owner() -> None:
    nodes = swarm("a", "b")
    with listening(nodes["b"], "a", limits=DirectLimits(handshake_seconds=0.3)) as here:
        host, port = here.address.split(":")
        silent, plain = (socket.create_connection((host, int(port))) for _ in range(2))
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + MAGIC * 100)
        with contextlib.closing(dial_direct(here.address, "b", nodes["a"], 5)) as line:
            line.send(1, PLACE, torch.ones(3, dtype=torch.uint8))
            assert here.pieces.get(timeout=SECONDS)[1] == PLACE
        assert is_hung_up(plain) and is_hung_up(silent)
        silent.close()
        plain.close()


def test_with_too_many_callers_the_oldest_are_disconnected_and_an_owner_is_served_at_once() -> None:
    nodes = swarm("a", "b")
    with listening(nodes["b"], "a") as here, contextlib.ExitStack() as stack:
        host, port = here.address.split(":")
        crowd = [
            stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(2 * LIMITS.handshaking)
        ]
        # Accepted after all of them, and none of them has gone by itself.
        line = stack.enter_context(contextlib.closing(dial_direct(here.address, "b", nodes["a"], 5)))
        line.send(1, PLACE, torch.ones(3, dtype=torch.uint8))
        assert here.pieces.get(timeout=SECONDS)[1] == PLACE
        assert all(is_hung_up(each) for each in crowd[: LIMITS.handshaking])
        crowd[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            crowd[-1].recv(1)


def test_an_owner_that_opens_lines_without_an_end_gets_its_share() -> None:
    nodes = swarm("a", "b")
    with listening(nodes["b"], "a") as here, contextlib.ExitStack() as stack:
        lines = [
            stack.enter_context(contextlib.closing(dial_direct(here.address, "b", nodes["a"], 5)))
            for _ in range(LIMITS.lines_per_node)
        ]
        for line in lines:
            line.send(1, PLACE, torch.ones(3, dtype=torch.uint8))
            assert here.pieces.get(timeout=SECONDS)[1] == PLACE
        over = stack.enter_context(contextlib.closing(dial_direct(here.address, "b", nodes["a"], 5)))
        assert over.receive() is None


@pytest.mark.parametrize(
    ("magic", "flags", "size"),
    [
        *((b"RVD\x02", 0, 4), (b"RVN\x01", 0, 4)),
        *((MAGIC, 4, 4), (MAGIC, 255, 4), (MAGIC, 0, PIECE_BYTES + 1), (MAGIC, 0, 2**32 - 1)),
    ],
)
def test_bytes_that_are_not_a_piece_end_the_line_and_cost_no_memory(
    magic: bytes, flags: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = swarm("a", "b")
    made: list[int] = []
    with listening(nodes["b"], "a") as here:
        connection = connect_direct(here.address, "b", nodes["a"].tls_keys(), 5)
        here.lines.get(timeout=SECONDS)
        monkeypatch.setattr(torch, "empty", lambda size, **_: made.append(size))
        connection.sendall(struct.pack("<4sQqIIIIIBI", magic, 1, 1, 0, 1, 0, 0, 0, flags, size))
        assert "a sent" in here.ends.get(timeout=SECONDS)
        assert made == [] and here.pieces.empty()
        monkeypatch.undo()
        until_broken(DirectLine(connection, "b"))


def test_a_line_that_ends_in_the_middle_of_a_piece_brings_nothing_of_it() -> None:
    nodes = swarm("a", "b")
    with listening(nodes["b"], "a") as here:
        connection = connect_direct(here.address, "b", nodes["a"].tls_keys(), 5)
        connection.sendall(struct.pack("<4sQqIIIIIBI", MAGIC, 1, 1, 0, 1, 0, 0, 0, 0, 1000) + b"x" * 999)
        connection.close()
        assert here.ends.get(timeout=SECONDS) == "" and here.pieces.empty()


def test_a_stop_ends_readers_callers_in_their_handshake_and_the_port() -> None:
    nodes = swarm("a", "b")
    with listening(nodes["b"], "a") as here:
        host, port = here.address.split(":")
        silent = socket.create_connection((host, int(port)))
        line = dial_direct(here.address, "b", nodes["a"], 5)
        line.send(1, PLACE, torch.ones(3, dtype=torch.uint8))
        here.pieces.get(timeout=SECONDS)
    assert here.ends.get(timeout=SECONDS) == ""
    assert is_hung_up(silent)
    silent.close()
    until_broken(line)
    with pytest.raises(PeerError):
        dial_direct(here.address, "b", nodes["a"], 1)


def test_a_port_that_is_taken_is_not_insisted_on_and_a_host_that_is_not_here_is_refused() -> None:
    node = swarm("a")["a"]
    server = DirectServer(node, lambda _: True, lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert server.start("127.0.0.1", taken.getsockname()[1]) != taken.getsockname()[1]
    server.stop()
    with pytest.raises(RunError, match=r"cannot listen on 192\.0\.2\.1"):
        DirectServer(node, lambda _: True, lambda _: None).start("192.0.2.1", 0)


def test_closing_a_line_wakes_its_receiver() -> None:
    nodes = swarm("a", "b")
    with listening(nodes["b"], "a") as here:
        line = dial_direct(here.address, "b", nodes["a"], 5)
        here.lines.get(timeout=SECONDS).close()
        assert here.ends.get(timeout=SECONDS) == ""
        until_broken(line)


def test_a_peer_that_takes_nothing_for_too_long_breaks_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = swarm("a", "b")
    monkeypatch.setattr(direct_line, "STALL_SECONDS", 1.0)
    go_on = threading.Event()
    server = DirectServer(nodes["b"], lambda _: True, lambda _: bool(go_on.wait(SECONDS)) and None)
    line = dial_direct(f"127.0.0.1:{server.start('127.0.0.1', 0)}", "b", nodes["a"], 5)
    watch = threading.Timer(SECONDS / 2, line.close)
    watch.start()
    try:
        until_broken(line)
        assert watch.is_alive(), "it waited without end"
    finally:
        watch.cancel()
        line.close()
        go_on.set()
        server.stop()


def test_closing_a_line_wakes_a_sender_whose_peer_does_not_read() -> None:
    nodes = swarm("a", "b")
    reached, go_on = threading.Event(), threading.Event()

    def take_nothing(line: DirectLine) -> None:
        reached.set()
        go_on.wait(SECONDS)

    server = DirectServer(nodes["b"], lambda _: True, take_nothing)
    line = dial_direct(f"127.0.0.1:{server.start('127.0.0.1', 0)}", "b", nodes["a"], 5)
    broken = threading.Event()
    sent = threading.Semaphore(0)

    def send() -> None:
        with contextlib.suppress(PeerError):
            while True:
                line.send(1, PLACE, torch.zeros(PIECE_BYTES, dtype=torch.uint8))
                sent.release()
        broken.set()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        assert reached.wait(SECONDS)
        # It can send until the system holds no more, and waits then.
        while sent.acquire(timeout=0.5):
            pass
        assert not broken.is_set()
        line.close()
        assert broken.wait(SECONDS)
    finally:
        line.close()
        go_on.set()
        server.stop()
        thread.join(SECONDS)
    with pytest.raises(PeerError, match="it was closed"):
        line.send(1, PLACE, torch.zeros(1, dtype=torch.uint8))
    assert line.receive() is None

"""Member process of Ravnest's ring in benchmarks.averaging, with the product's own arithmetic, lines and threads.

Its argument `extra` is the codec, and "tls" or "plaintext". There is no coordinator: the members know one another's
addresses, weights and norms from the start.
"""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.averaging_parts.member import base_values, check_mean, meet, my_place, serve
from benchmarks.averaging_parts.nodes import node_name, open_node
from benchmarks.averaging_parts.plaintext import PlaintextServer, use_plaintext
from ravnest.averaging.ring_reduce import Piece, RingReduce
from ravnest.averaging.segments import RingPosition
from ravnest.codecs.codec import codec_named
from ravnest.net.direct_line import DirectLine
from ravnest.net.direct_server import DirectServer
from ravnest.net.frames.frames import RingPlace
from ravnest.net.v1.control_pb2 import Neighbour
from ravnest.provider.rings.attempt import RingAttempt
from ravnest.provider.rings.lines import RingLines

_TOLERANCES = {"float32": 1e-5, "lossless": 1e-5, "float16": 2e-3, "bfloat16": 2e-2, "int8": 5e-2, "int4": 0.5}


class RingMember:
    """One owner of one ring. Each `average` is a round."""

    def __init__(self, index: int, count: int, own: torch.Tensor, norms: list[float], codec: str) -> None:
        self._index, self._count = index, count
        self._own, self._norms = own, norms
        self._codec = codec_named(codec)
        self._round = 0
        self._attempt: RingAttempt | None = None
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._memory: torch.Tensor | None = None
        self.lines: RingLines | None = None

    def take_all(self, line: DirectLine) -> None:
        """Receive the pieces of the previous member. A piece that arrives early waits, as in the product."""
        while (piece := line.receive(self._room)) is not None:
            _, place, data = piece
            self._at(place).take(Piece(place.hop, place.segment, place.chunk, data))

    def _room(self, generation: int, place: RingPlace, size_bytes: int) -> torch.Tensor | None:
        return self._at(place).room(place.hop, place.segment, place.chunk, size_bytes)

    def _at(self, place: RingPlace) -> RingAttempt:
        with self._changed:
            self._changed.wait_for(lambda: place.round <= self._round)
            assert self._attempt is not None
            return self._attempt

    def average(self) -> torch.Tensor:
        lines, ended = self.lines, threading.Event()
        assert lines is not None
        after, number = node_name((self._index + 1) % self._count), self._round + 1
        weights = [1 / self._count] * self._count

        def send(piece: Piece) -> None:
            place = RingPlace(number, 0, 1, piece.hop, piece.segment, piece.chunk)
            lines.put(after, place, piece.data)

        def over(error: Exception | None) -> None:
            self._failure = error
            ended.set()

        memory, self._memory = self._memory, None
        position = RingPosition(self._index, weights, self._norms)
        reduce = RingReduce(self._own, self._own.numel(), position, self._codec, memory=memory)
        attempt = RingAttempt(1, node_name(self._index - 1 % self._count), reduce, send, over)
        with self._changed:
            self._attempt, self._round = attempt, number
            self._changed.notify_all()
        attempt.start()
        ended.wait()
        if self._failure is not None:
            raise self._failure
        # No more pieces of this round arrive. Like in RingState, the next round reuses its memory, so that the time to
        # free it is not measured.
        self._attempt = None
        self._memory = reduce.result
        return reduce.result


def main() -> None:
    place = my_place()
    codec, _, security = place.extra.partition(",")
    node = open_node(Path(place.folder), place.index)
    base = base_values(place)
    length = float(base.norm(dtype=torch.float64)) * (1 + 1e-6)
    norms = [length * (index + 1) for index in range(place.count)]
    member = RingMember(place.index, place.count, base * (place.index + 1), norms, codec)
    before = node_name((place.index - 1) % place.count)
    if security == "plaintext":
        use_plaintext()
        server: DirectServer = PlaintextServer(before, node, lambda name: name == before, member.take_all)
    else:
        server = DirectServer(node, lambda name: name == before, member.take_all)
    port = server.start(place.host, 0)
    addresses = meet(f"{place.host}:{port}")
    after = (place.index + 1) % place.count
    neighbour = Neighbour(node=node_name(after), direct_address=addresses[after])
    member.lines = _on_a_loop(lambda: _lines(neighbour, node))
    tolerance = _TOLERANCES[codec]

    def check(mean: torch.Tensor) -> None:
        check_mean(mean, base, place.mean_factor, tolerance)

    serve(lambda: None, lambda prepared: member.average(), check)
    server.stop()


class _SendingOnly:
    """Receiver of lines that only send. Pieces arrive over the direct lines that other members open."""

    def take(self, peer: str, generation: int, place: RingPlace, data: torch.Tensor) -> None:
        raise AssertionError("a piece came over a link")

    def is_wanted(self, place: RingPlace) -> bool:
        return True

    def on_line_broken(self, peer: str, reason: str) -> None:
        raise RuntimeError(f"the line to {peer} broke: {reason}")


def _lines(neighbour: Neighbour, node: Any) -> RingLines:
    # Direct lines need no coordinator.
    client, receiver = cast(Any, None), cast(Any, _SendingOnly())
    return RingLines([neighbour], 1, node, client, receiver)


def _on_a_loop(make: Callable[[], RingLines]) -> RingLines:
    """Create the lines on an event loop in a thread of its own, as in a provider."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def made() -> RingLines:
        return make()

    return asyncio.run_coroutine_threadsafe(made(), loop).result()


if __name__ == "__main__":
    main()

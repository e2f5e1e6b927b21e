"""A ring in memory: members, their coordinator and the messages between them, delivered one at a time.

Time only passes when no message is on its way. A member that is killed sends nothing more, and all messages from it or
to it that are on their way are lost.
"""

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ravnest.averaging.outer.outer import outer_named
from ravnest.averaging.participants import RingHistory
from ravnest.averaging.ring_reduce import Piece, RingReduce
from ravnest.averaging.ring_round import RingRound, RoundSettings
from ravnest.averaging.ring_state import Contribution, RingState
from ravnest.averaging.round_messages import Abort, Begin, CatchUp, Commit, Join, Notice
from ravnest.averaging.segments import RingPosition
from ravnest.averaging.vector import Entry, RingVector
from ravnest.codecs.codec import Codec
from ravnest.errors import PeerError

VECTOR = RingVector([Entry("weight", (5,)), Entry("bias", (2,))], [Entry("mean", (3,))])
COORDINATOR = "coordinator"
SETTINGS = RoundSettings(join_seconds=10.0, catch_up_seconds=20.0, reduce_seconds=20.0, outlier=None)


def drawn(seed: int) -> Tensor:
    return torch.randn(VECTOR.values, generator=torch.Generator().manual_seed(seed))


@dataclass
class Node:
    """One member. Only a commit or a catch-up changes its tensors, `now`."""

    name: str
    state: RingState
    now: Tensor
    alive: bool = True
    committed: int = 0
    contribution: Contribution | None = None
    reduce: RingReduce | None = None
    attempt: int = 0
    order: tuple[str, ...] = ()
    early: list[tuple[int, str, Piece]] = field(default_factory=list)
    moved_on: bool = False

    @property
    def after(self) -> str:
        return self.order[(self.order.index(self.name) + 1) % len(self.order)]


class RingSwarm:
    def __init__(self, count: int, codec: Codec, outer: str = "mean") -> None:
        self.nodes = {
            name: Node(name, RingState(VECTOR, drawn(0), outer_named(outer), codec), drawn(0))
            for name in (f"n{i}" for i in range(count))
        }
        self.lines: deque[tuple[str, str, Any]] = deque()
        self.delivered = 0
        self.now = 0.0
        self.newest = 0
        self.round = 0
        self.ring: RingRound | None = None
        self.commit: Commit | None = None
        self.notices: list[Notice] = []
        self.progress_after_snapshot = False
        self.shuffle: random.Random | None = None
        self.repeat = False

    @property
    def survivors(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]

    def learn(self, seed: int) -> None:
        for i, node in enumerate(self.survivors):
            node.now += drawn(seed + 100 * (i + 1))

    def begin(self, round: int, samples: dict[str, int] | None = None) -> None:
        """All members that are alive take their snapshots and join."""
        samples = samples or {name: 10 * (i + 1) for i, name in enumerate(self.nodes)}
        self.commit, self.round = None, round
        self.ring = RingRound(samples, RingHistory(self.newest), SETTINGS, self.now)
        for node in self.survivors:
            node.contribution = node.state.contribute(node.now.clone())
            node.reduce, node.attempt, node.moved_on = None, 0, False
            node.early.clear()
            join = Join(
                samples[node.name], node.contribution.norm, node.contribution.finite, node.state.committed, (round,)
            )
            self.send(node.name, COORDINATOR, join)
            if self.progress_after_snapshot:
                node.now += 0.125
                node.moved_on = True

    def send(self, source: str, to: str, message: Any) -> None:
        self.lines.append((source, to, message))

    def kill(self, name: str, told: bool) -> None:
        """`told`: the coordinator learns of it at once; otherwise it finds out at the deadline."""
        self.nodes[name].alive = False
        self.lines = deque(line for line in self.lines if name not in line[:2])
        if told:
            assert self.ring is not None
            self.act(self.ring.gone(name, "killed", self.now))

    def run(self, kill: str | None = None, at: int = -1, told: bool = True) -> None:
        """Run until the round is over and no message is on its way. Kill `kill` before the message number `at`."""
        assert self.ring is not None
        while True:
            if kill is not None and self.delivered == at:
                self.kill(kill, told)
                kill = None
            elif self.lines:
                self.step()
            elif self.ring.outcome is None:
                self.wait()
            else:
                return

    def step(self) -> None:
        # With `shuffle`, any line may be next; messages from one member to another stay in order.
        chosen = self.lines[self.shuffle.randrange(len(self.lines)) if self.shuffle else 0][:2]
        first = next(i for i, line in enumerate(self.lines) if line[:2] == chosen)
        source, to, message = self.lines[first]
        del self.lines[first]
        self.delivered += 1
        for _ in range(2 if self.repeat and COORDINATOR in (source, to) else 1):
            self.at_coordinator(source, message) if to == COORDINATOR else self.at_node(self.nodes[to], source, message)

    def wait(self) -> None:
        """Time passes until the deadline; the members that are alive report their progress."""
        assert self.ring is not None and self.ring.deadline is not None
        self.now = max(self.now, self.ring.deadline)
        for node in self.survivors:
            if node.reduce is not None:
                self.ring.progressed(node.name, node.attempt, node.reduce.progress, self.now)
        self.act(self.ring.tick(self.now))

    def at_coordinator(self, source: str, message: Any) -> None:
        assert self.ring is not None
        match message:
            case Join():
                self.act(self.ring.joined(source, message, self.now))
            case ("caught up",):
                self.act(self.ring.caught_up(source, self.now))
            case ("reduced", attempt, digest):
                self.act(self.ring.reduced(source, attempt, digest, self.now))
            case ("failed", attempt, blamed, reason):
                self.act(self.ring.failed(source, attempt, blamed, reason, self.now))

    def act(self, actions: list[Any]) -> None:
        assert self.ring is not None
        for action in actions:
            match action:
                case Begin(members=members):
                    for member in members:
                        self.tell(member.node, action)
                case CatchUp(donor=donor):
                    self.tell(donor, action)
                case Commit(nodes=nodes):
                    assert self.commit is None
                    self.commit = action
                    self.newest = self.round
                    for name in nodes:
                        self.tell(name, action)
                case Abort(nodes=nodes):
                    for name in nodes:
                        self.tell(name, action)
                case Notice():
                    self.notices.append(action)

    def tell(self, name: str, action: Any) -> None:
        if self.nodes[name].alive:
            self.send(COORDINATOR, name, action)

    def at_node(self, node: Node, source: str, message: Any) -> None:
        match message:
            case Begin():
                self.begin_attempt(node, message)
            case (int() as attempt, Piece() as piece):
                if attempt > node.attempt:
                    node.early.append((attempt, source, piece))
                elif attempt == node.attempt:
                    self.take(node, source, piece)
            case CatchUp():
                self.send(node.name, message.node, ("donation", node.state.committed, node.state.donation()))
            case ("donation", committed, values):
                if committed > node.state.committed:
                    for name, add in node.state.catch_up(committed, values).adds.items():
                        VECTOR.views(node.now)[name].add_(add)
                self.send(node.name, COORDINATOR, ("caught up",))
            case Commit():
                self.apply(node, message)
            case Abort():
                node.contribution, node.reduce = None, None

    def begin_attempt(self, node: Node, begin: Begin) -> None:
        if begin.attempt <= node.attempt or node.contribution is None:
            return
        node.attempt = begin.attempt
        node.order = tuple(member.node for member in begin.members)
        node.reduce = node.state.reduce(
            node.contribution,
            RingPosition(
                node.order.index(node.name),
                [member.weight for member in begin.members],
                [member.norm for member in begin.members],
            ),
        )
        for piece in node.reduce.start():
            self.send(node.name, node.after, (node.attempt, piece))
        early, node.early = node.early, []
        for attempt, source, piece in early:
            if attempt == node.attempt:
                self.take(node, source, piece)
            elif attempt > node.attempt:
                node.early.append((attempt, source, piece))

    def take(self, node: Node, source: str, piece: Piece) -> None:
        if node.reduce is None:
            return
        try:
            onward = node.reduce.receive(piece)
        except PeerError as error:
            self.send(node.name, COORDINATOR, ("failed", node.attempt, source, str(error)))
            return
        if onward is not None:
            self.send(node.name, node.after, (node.attempt, onward))
        if node.reduce.done:
            self.send(node.name, COORDINATOR, ("reduced", node.attempt, node.reduce.digest))

    def apply(self, node: Node, commit: Commit) -> None:
        assert self.ring is not None
        if node.contribution is None or node.contribution.spent:
            return
        assert node.reduce is not None and node.attempt == commit.attempt
        change = node.state.commit(self.round, node.contribution, node.reduce)
        node.committed = self.round
        tensors = VECTOR.views(node.now)
        if node.moved_on:
            for name, add in change.adds.items():
                tensors[name].add_(add)
        else:
            assert change.becomes is not None
            for name, values in change.becomes.items():
                tensors[name].copy_(values)

"""What a coordinator that is started again wants to know of its swarm: who was there, who held what, where it listened.

It is written while the run goes on, so that a coordinator that was killed leaves it behind as well. A killed process
loses nothing that was written; only a machine that loses its power may lose the last seconds, which is why nothing here
decides what is trained: that is the checkpoint's.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ravnest.coordinator.access.store import Store
from ravnest.planner.problem import Line, Pair
from ravnest.planner.reliability import Attendance


@dataclass(frozen=True, slots=True)
class Seen:
    """A provider that is connected."""

    node_id: str
    address: str
    device: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class KnownMember:
    """A provider that has been there. `stage` is the one it held last, counted from 0; None: it held none."""

    node_id: str
    address: str
    device: str
    memory_bytes: int
    seen_at: float
    connected: bool
    """As its coordinator left it: of a coordinator that was killed, it says who was there then."""
    kicked: bool
    stage: int | None


@dataclass(frozen=True, slots=True)
class Position:
    """Where the ledger stood: microbatches fed and completed, updates and samples, at a time."""

    fed: int
    completed: int
    updates: int
    samples: int
    at: float


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the coordinator listened. `advertised`: whether it was told what address invites should name."""

    host: str
    port: int
    advertised: bool


class SwarmState:
    """The state in one run's store. Every method may be called from any thread; RunError when it cannot be used."""

    def __init__(self, path: Path) -> None:
        self._store = Store(path)
        with self._store.used() as connection:
            # No wait for the disk every few seconds: see above.
            connection.execute("PRAGMA synchronous = NORMAL")

    def close(self) -> None:
        """Let go of the file; may be called again."""
        self._store.close()

    def clear_connected(self) -> None:
        """A coordinator begins: who was connected to the one before is not connected to this one yet."""
        with self._store.used() as connection:
            connection.execute("UPDATE members SET connected = 0")

    def connected(self, present: Iterable[Seen], now: float) -> None:
        """These, and no others, are connected."""
        rows = [(seen.node_id, seen.address, seen.device, seen.memory_bytes, now) for seen in present]
        with self._store.transaction() as connection:
            connection.execute("UPDATE members SET connected = 0, seen_at = ? WHERE connected = 1", (now,))
            connection.executemany("INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?, 1)", rows)

    def attended(self, seen: Mapping[str, Attendance]) -> None:
        """Keeps what was seen of these providers, by node id."""
        rows = [
            (node_id, each.stays, each.connected_seconds, each.losses, each.departures, each.interruptions)
            for node_id, each in seen.items()
        ]
        with self._store.transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO attendance VALUES (?, ?, ?, ?, ?, ?)", rows)

    def attendances(self) -> dict[str, Attendance]:
        """What was seen of every provider that has been there, by node id."""
        with self._store.used() as connection:
            rows = connection.execute(
                "SELECT node_id, stays, connected_seconds, losses, departures, interruptions FROM attendance"
            ).fetchall()
        return {node_id: Attendance(*counts) for node_id, *counts in rows}

    def planned(self, nodes: Sequence[str]) -> None:
        """These providers hold the stages, in order."""
        with self._store.transaction() as connection:
            connection.execute("DELETE FROM plan")
            connection.executemany("INSERT INTO plan (stage, node_id) VALUES (?, ?)", enumerate(nodes))

    def reached(self, position: Position) -> None:
        """The ledger stands here."""
        with self._store.used() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO position (id, fed, completed, updates, samples, at) VALUES (0, ?, ?, ?, ?, ?)",
                (position.fed, position.completed, position.updates, position.samples, position.at),
            )

    def announced(self, replica: str) -> None:
        """A replica is about to be announced; of those before it a few are remembered."""
        with self._store.transaction() as connection:
            connection.execute("INSERT INTO replicas (announced) VALUES (?)", (replica,))
            connection.execute(
                "DELETE FROM replicas WHERE id <= (SELECT MAX(id) FROM replicas) - ?", (_REMEMBERED_REPLICAS,)
            )

    def replicas(self) -> list[str]:
        """The replicas that were announced last."""
        with self._store.used() as connection:
            return [text for (text,) in connection.execute("SELECT announced FROM replicas ORDER BY id")]

    def stands(self, record: str) -> None:
        """The stages are held so."""
        with self._store.used() as connection:
            connection.execute("INSERT OR REPLACE INTO standing (id, record, changing) VALUES (0, ?, 0)", (record,))

    def changes(self) -> None:
        """From now on the stages are held otherwise, until it is said how."""
        with self._store.used() as connection:
            connection.execute("UPDATE standing SET changing = 1")

    def standing(self) -> tuple[str, bool] | None:
        """How the stages were held last, and whether that was changing; None before they were."""
        with self._store.used() as connection:
            row = connection.execute("SELECT record, changing FROM standing").fetchone()
        return None if row is None else (str(row[0]), bool(row[1]))

    def measured(self, lines: Mapping[Pair, Line], now: float) -> None:
        """These lines between providers were measured."""
        rows = [(*pair, line.bytes_per_second, line.latency_seconds, now) for pair, line in lines.items()]
        with self._store.transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO lines VALUES (?, ?, ?, ?, ?)", rows)

    def lines(self, now: float) -> dict[Pair, Line]:
        """What lines carried when they were measured, less than an hour ago."""
        with self._store.used() as connection:
            rows = connection.execute(
                "SELECT sender, receiver, bytes_per_second, latency_seconds FROM lines WHERE at > ? AND at <= ?",
                (now - _LINE_SECONDS, now),
            ).fetchall()
        return {(sender, receiver): Line(rate, latency) for sender, receiver, rate, latency in rows}

    def listens(self, listening: Listening) -> None:
        """The coordinator listens there."""
        with self._store.used() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO listening (id, host, port, advertised) VALUES (0, ?, ?, ?)",
                (listening.host, listening.port, listening.advertised),
            )

    def asked_for(self, clusters: int) -> None:
        """The requester wants so many clusters."""
        with self._store.used() as connection:
            connection.execute("INSERT OR REPLACE INTO clusters (id, count) VALUES (0, ?)", (clusters,))

    def clusters(self) -> int | None:
        """How many the requester has asked for; None: as many as are fastest."""
        with self._store.used() as connection:
            row = connection.execute("SELECT count FROM clusters").fetchone()
        return None if row is None else int(row[0])

    def members(self) -> list[KnownMember]:
        """Everybody who has been there, by stage and name."""
        with self._store.used() as connection:
            rows = connection.execute(
                "SELECT m.node_id, m.address, m.device, m.memory_bytes, m.seen_at, m.connected, "
                "n.kicked_at IS NOT NULL, p.stage FROM members m LEFT JOIN nodes n USING (node_id) "
                "LEFT JOIN plan p USING (node_id) ORDER BY p.stage IS NULL, p.stage, m.node_id"
            ).fetchall()
        return [
            KnownMember(node_id, address, device, memory_bytes, seen_at, bool(connected), bool(kicked), stage)
            for node_id, address, device, memory_bytes, seen_at, connected, kicked, stage in rows
        ]

    def plan(self) -> list[str]:
        """Who held the stages, in order; empty before the first plan."""
        with self._store.used() as connection:
            return [node for (node,) in connection.execute("SELECT node_id FROM plan ORDER BY stage")]

    def position(self) -> Position | None:
        """Where the ledger stood last; None before it was fed."""
        with self._store.used() as connection:
            row = connection.execute("SELECT fed, completed, updates, samples, at FROM position").fetchone()
        return None if row is None else Position(*row)

    def listening(self) -> Listening | None:
        """Where the coordinator listened last; None when it never did."""
        with self._store.used() as connection:
            row = connection.execute("SELECT host, port, advertised FROM listening").fetchone()
        return None if row is None else Listening(row[0], row[1], bool(row[2]))


def known_from_before(members: Sequence[KnownMember]) -> str:
    """Like "knows anna, ben and carla from before: waiting for them to come back"; empty when it knows nobody."""
    names = [member.node_id for member in members if not member.kicked]
    if not names:
        return ""
    if len(names) > _NAMED:
        names[_NAMED - 1 :] = [f"{len(names) - _NAMED + 1} others"]
    together = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"knows {together} from before: waiting for {'it' if len(names) == 1 else 'them'} to come back"


_REMEMBERED_REPLICAS = 32
"""Of several clusters, a few of each."""

_LINE_SECONDS = 3600.0
"""For which a line is taken for what it was: an evening is another matter than a morning."""

_NAMED = 8
"""So many are named at most."""

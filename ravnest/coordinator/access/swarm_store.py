"""State of a swarm for a restarted coordinator: its providers, their stages, and the coordinator's address.

The coordinator writes it while the run goes on, so that it exists after a kill too. A killed process loses nothing that
was written. A power failure may lose the last seconds, except of the manifest of complete replicas, which is synced to
the disk.
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
    """A provider that has been connected. `stage` is the last one that it held, counted from 0; None for none."""

    node_id: str
    address: str
    device: str
    memory_bytes: int
    seen_at: float
    connected: bool
    """As last written: after a kill of the coordinator, whether the provider was connected then."""
    kicked: bool
    stage: int | None


@dataclass(frozen=True, slots=True)
class Position:
    """Position of the ledger at a time: microbatches fed and completed, updates and samples."""

    fed: int
    completed: int
    updates: int
    samples: int
    at: float


@dataclass(frozen=True, slots=True)
class Listening:
    """Address on which the coordinator listened. `advertised`: whether the address in invites was given."""

    host: str
    port: int
    advertised: bool


class SwarmState:
    """State in one run's store. All methods are thread-safe; RunError when the store cannot be used."""

    def __init__(self, path: Path) -> None:
        self._store = Store(path)
        with self._store.used() as connection:
            # Writes do not wait for the disk; the module docstring says what that may lose.
            connection.execute("PRAGMA synchronous = NORMAL")

    def close(self) -> None:
        """Closes the file; idempotent."""
        self._store.close()

    def clear_connected(self) -> None:
        """Marks all providers as disconnected, when a coordinator starts."""
        with self._store.used() as connection:
            connection.execute("UPDATE members SET connected = 0")

    def connected(self, present: Iterable[Seen], now: float) -> None:
        """Stores the connected providers."""
        rows = [(seen.node_id, seen.address, seen.device, seen.memory_bytes, now) for seen in present]
        with self._store.transaction() as connection:
            connection.execute("UPDATE members SET connected = 0, seen_at = ? WHERE connected = 1", (now,))
            connection.executemany("INSERT OR REPLACE INTO members VALUES (?, ?, ?, ?, ?, 1)", rows)

    def attended(self, seen: Mapping[str, Attendance]) -> None:
        """Stores the counts of these providers' presence, by node id."""
        rows = [
            (node_id, each.stays, each.connected_seconds, each.losses, each.departures, each.interruptions)
            for node_id, each in seen.items()
        ]
        with self._store.transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO attendance VALUES (?, ?, ?, ?, ?, ?)", rows)

    def attendances(self) -> dict[str, Attendance]:
        """The counts of every provider's presence, by node id."""
        with self._store.used() as connection:
            rows = connection.execute(
                "SELECT node_id, stays, connected_seconds, losses, departures, interruptions FROM attendance"
            ).fetchall()
        return {node_id: Attendance(*counts) for node_id, *counts in rows}

    def planned(self, nodes: Sequence[str]) -> None:
        """Stores the providers of the stages, in order."""
        with self._store.transaction() as connection:
            connection.execute("DELETE FROM plan")
            connection.executemany("INSERT INTO plan (stage, node_id) VALUES (?, ?)", enumerate(nodes))

    def reached(self, position: Position) -> None:
        """Stores the position of the ledger."""
        with self._store.used() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO position (id, fed, completed, updates, samples, at) VALUES (0, ?, ?, ?, ?, ?)",
                (position.fed, position.completed, position.updates, position.samples, position.at),
            )

    def announced(self, replica: str) -> None:
        """Stores a replica that is about to be announced; old ones are deleted."""
        with self._store.transaction() as connection:
            connection.execute("INSERT INTO replicas (announced) VALUES (?)", (replica,))
            connection.execute(
                "DELETE FROM replicas WHERE id <= (SELECT MAX(id) FROM replicas) - ?", (_REMEMBERED_REPLICAS,)
            )

    def completed(self, cluster: str, replica: str) -> None:
        """Stores the newest complete replica of a cluster. A power failure after this call does not lose it."""
        with self._store.used() as connection:
            connection.execute("PRAGMA synchronous = FULL")
            try:
                # A new row, so that the clusters of the latest deployments have the highest row numbers.
                connection.execute(
                    "INSERT OR REPLACE INTO complete (cluster, replica) VALUES (?, ?)", (cluster, replica)
                )
                connection.execute(
                    "DELETE FROM complete WHERE rowid <= (SELECT MAX(rowid) FROM complete) - ?", (_REMEMBERED_REPLICAS,)
                )
            finally:
                connection.execute("PRAGMA synchronous = NORMAL")

    def complete_replicas(self) -> list[str]:
        """The newest complete replica of each cluster, also of earlier deployments."""
        with self._store.used() as connection:
            return [text for (text,) in connection.execute("SELECT replica FROM complete ORDER BY rowid")]

    def replicas(self) -> list[str]:
        """The latest announced replicas."""
        with self._store.used() as connection:
            return [text for (text,) in connection.execute("SELECT announced FROM replicas ORDER BY id")]

    def stands(self, record: str) -> None:
        """Stores the record of the current deployment."""
        with self._store.used() as connection:
            connection.execute("INSERT OR REPLACE INTO standing (id, record, changing) VALUES (0, ?, 0)", (record,))

    def changes(self) -> None:
        """Marks the record as outdated, while the deployment changes."""
        with self._store.used() as connection:
            connection.execute("UPDATE standing SET changing = 1")

    def standing(self) -> tuple[str, bool] | None:
        """The latest record of a deployment, and whether it is outdated; None before the first."""
        with self._store.used() as connection:
            row = connection.execute("SELECT record, changing FROM standing").fetchone()
        return None if row is None else (str(row[0]), bool(row[1]))

    def measured(self, lines: Mapping[Pair, Line], now: float) -> None:
        """Stores measured lines between providers."""
        rows = [(*pair, line.bytes_per_second, line.latency_seconds, now) for pair, line in lines.items()]
        with self._store.transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO lines VALUES (?, ?, ?, ?, ?)", rows)

    def lines(self, now: float) -> dict[Pair, Line]:
        """The lines that were measured less than an hour ago."""
        with self._store.used() as connection:
            rows = connection.execute(
                "SELECT sender, receiver, bytes_per_second, latency_seconds FROM lines WHERE at > ? AND at <= ?",
                (now - _LINE_SECONDS, now),
            ).fetchall()
        return {(sender, receiver): Line(rate, latency) for sender, receiver, rate, latency in rows}

    def listens(self, listening: Listening) -> None:
        """Stores the address on which the coordinator listens."""
        with self._store.used() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO listening (id, host, port, advertised) VALUES (0, ?, ?, ?)",
                (listening.host, listening.port, listening.advertised),
            )

    def asked_for(self, clusters: int) -> None:
        """Stores the number of clusters that the requester has asked for."""
        with self._store.used() as connection:
            connection.execute("INSERT OR REPLACE INTO clusters (id, count) VALUES (0, ?)", (clusters,))

    def clusters(self) -> int | None:
        """The number of clusters that the requester has asked for; None for the fastest number."""
        with self._store.used() as connection:
            row = connection.execute("SELECT count FROM clusters").fetchone()
        return None if row is None else int(row[0])

    def members(self) -> list[KnownMember]:
        """All providers that have been connected, by stage and name."""
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
        """The providers of the stages, in order; empty before the first plan."""
        with self._store.used() as connection:
            return [node for (node,) in connection.execute("SELECT node_id FROM plan ORDER BY stage")]

    def position(self) -> Position | None:
        """The latest position of the ledger; None before the first."""
        with self._store.used() as connection:
            row = connection.execute("SELECT fed, completed, updates, samples, at FROM position").fetchone()
        return None if row is None else Position(*row)

    def listening(self) -> Listening | None:
        """The latest address on which the coordinator listened; None if it never did."""
        with self._store.used() as connection:
            row = connection.execute("SELECT host, port, advertised FROM listening").fetchone()
        return None if row is None else Listening(row[0], row[1], bool(row[2]))


def known_from_before(members: Sequence[KnownMember]) -> str:
    """Like "knows anna, ben and carla from before: waiting for them to come back"; empty without any."""
    names = [member.node_id for member in members if not member.kicked]
    if not names:
        return ""
    if len(names) > _NAMED:
        names[_NAMED - 1 :] = [f"{len(names) - _NAMED + 1} others"]
    together = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"knows {together} from before: waiting for {'it' if len(names) == 1 else 'them'} to come back"


_REMEMBERED_REPLICAS = 32
"""Enough for a few of each cluster."""

_LINE_SECONDS = 3600.0
"""Lifetime of a measurement: the speed of home lines changes over the day."""

_NAMED = 8
"""Maximum number of providers that are named."""

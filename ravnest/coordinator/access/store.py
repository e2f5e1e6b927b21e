"""Store of a served run: one SQLite file, which `ravnest invite`, `kick` and `status` open as well.

It holds invites and nodes (`invites.py`), and the state that a restarted coordinator needs (`swarm_store.py`). Events
are in events.jsonl, trained weights in checkpoints.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ravnest.errors import DiskFullError, RunError

IN_MEMORY: Final = Path(":memory:")
"""Path of a store that ends with its process."""

SCHEMA_VERSION: Final = 6
"""Version of the tables below. It grows whenever an older program could misread the tables of a newer one."""

_BUSY_SECONDS: Final = 5.0
_TABLES: Final = (
    """CREATE TABLE IF NOT EXISTS tokens (
        id TEXT PRIMARY KEY, root BLOB NOT NULL, uses_left INTEGER, expires_at REAL, revoked_at REAL,
        created_at REAL NOT NULL, note TEXT NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS nodes (
        node_id TEXT PRIMARY KEY, key_id TEXT NOT NULL UNIQUE, token_id TEXT NOT NULL, joined_at REAL NOT NULL,
        kicked_at REAL, kick_reason TEXT NOT NULL DEFAULT ''
    )""",
    # The address in invites.
    "CREATE TABLE IF NOT EXISTS coordinator (id INTEGER PRIMARY KEY, host TEXT NOT NULL, port INTEGER NOT NULL)",
    # The address on which the coordinator listens, and whether the address in invites was given.
    """CREATE TABLE IF NOT EXISTS listening (
        id INTEGER PRIMARY KEY, host TEXT NOT NULL, port INTEGER NOT NULL, advertised INTEGER NOT NULL
    )""",
    # The last known state of each node.
    """CREATE TABLE IF NOT EXISTS members (
        node_id TEXT PRIMARY KEY, address TEXT NOT NULL, device TEXT NOT NULL, memory_bytes INTEGER NOT NULL,
        seen_at REAL NOT NULL, connected INTEGER NOT NULL
    )""",
    # Counts of each provider's presence, a `planner.reliability.Attendance`.
    """CREATE TABLE IF NOT EXISTS attendance (
        node_id TEXT PRIMARY KEY, stays INTEGER NOT NULL, connected_seconds REAL NOT NULL, losses INTEGER NOT NULL,
        departures INTEGER NOT NULL, interruptions INTEGER NOT NULL
    )""",
    # The number of clusters that the requester has asked for.
    "CREATE TABLE IF NOT EXISTS clusters (id INTEGER PRIMARY KEY, count INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS plan (stage INTEGER PRIMARY KEY, node_id TEXT NOT NULL)",
    # The latest announced replicas, as `replicas.surviving.AnnouncedReplica` writes them.
    "CREATE TABLE IF NOT EXISTS replicas (id INTEGER PRIMARY KEY, announced TEXT NOT NULL)",
    # The manifest: of each cluster the newest complete replica, with its parts, as `replicas.surviving` writes it.
    "CREATE TABLE IF NOT EXISTS complete (cluster TEXT PRIMARY KEY, replica TEXT NOT NULL)",
    # The stages and their providers, as `standing.DeploymentRecord` writes it, and whether that was changing.
    "CREATE TABLE IF NOT EXISTS standing (id INTEGER PRIMARY KEY, record TEXT NOT NULL, changing INTEGER NOT NULL)",
    """CREATE TABLE IF NOT EXISTS lines (
        sender TEXT NOT NULL, receiver TEXT NOT NULL, bytes_per_second REAL NOT NULL, latency_seconds REAL NOT NULL,
        at REAL NOT NULL, PRIMARY KEY (sender, receiver))""",
    """CREATE TABLE IF NOT EXISTS position (
        id INTEGER PRIMARY KEY, fed INTEGER NOT NULL, completed INTEGER NOT NULL, updates INTEGER NOT NULL,
        samples INTEGER NOT NULL, at REAL NOT NULL
    )""",
)


class Store:
    """Connection to the store. Thread-safe; RunError when the file cannot be used."""

    def __init__(self, path: Path = IN_MEMORY) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            if path != IN_MEMORY:
                # Created before SQLite does, because its journals copy the mode of the file. An existing file is not
                # opened here: to close it would drop the locks of this process's other connections.
                with suppress(FileExistsError):
                    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
                path.chmod(0o600)
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise self._unusable(error) from None
        try:
            with self.used() as connection:
                self._prepare(connection)
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Closes the file; idempotent."""
        with self._lock:
            self._connection.close()

    @contextmanager
    def used(self) -> Iterator[sqlite3.Connection]:
        """The connection, for this thread alone until the end of the block."""
        with self._lock:
            try:
                yield self._connection
            except sqlite3.Error as error:
                raise self._unusable(error) from None

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """The same, as a transaction: all of the block takes effect, or none of it."""
        with self.used() as connection:
            # IMMEDIATE: no other process writes between a read and a write of the block.
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def _prepare(self, connection: sqlite3.Connection) -> None:
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if version > SCHEMA_VERSION:
            raise RunError(
                f"the store {self._path} was written by a newer Ravnest (its schema is {version}, this program knows "
                f"{SCHEMA_VERSION}); update Ravnest to use this run"
            )
        if version == SCHEMA_VERSION:
            return
        connection.execute("PRAGMA journal_mode = WAL")
        for table in _TABLES:
            connection.execute(table)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _unusable(self, error: Exception) -> RunError:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return DiskFullError(f"cannot write {self._path}: the disk is full; free some space")
        return RunError(f"the store {self._path} cannot be used: {error}; check its owner and the free space")

"""The store of a run that is served: one SQLite file, which `ravnest invite`, `kick` and `status` may open as well.

It holds what has no other home in the run directory: invites and nodes (`invites.py`), and what a restarted coordinator
needs to know of its swarm (`swarm_store.py`). Events are in events.jsonl, trained weights in checkpoints.
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
"""The store of a swarm that ends with its process."""

SCHEMA_VERSION: Final = 5
"""Of the tables below: raised whenever an older program could misread what a newer one has written."""

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
    # The address that invites name.
    "CREATE TABLE IF NOT EXISTS coordinator (id INTEGER PRIMARY KEY, host TEXT NOT NULL, port INTEGER NOT NULL)",
    # Where the coordinator listens, and whether it was told what invites should name.
    """CREATE TABLE IF NOT EXISTS listening (
        id INTEGER PRIMARY KEY, host TEXT NOT NULL, port INTEGER NOT NULL, advertised INTEGER NOT NULL
    )""",
    # A node as it was when it was last there.
    """CREATE TABLE IF NOT EXISTS members (
        node_id TEXT PRIMARY KEY, address TEXT NOT NULL, device TEXT NOT NULL, memory_bytes INTEGER NOT NULL,
        seen_at REAL NOT NULL, connected INTEGER NOT NULL
    )""",
    # What was seen of a provider's presence, as `planner.reliability.Attendance` has it.
    """CREATE TABLE IF NOT EXISTS attendance (
        node_id TEXT PRIMARY KEY, stays INTEGER NOT NULL, connected_seconds REAL NOT NULL, losses INTEGER NOT NULL,
        departures INTEGER NOT NULL, interruptions INTEGER NOT NULL
    )""",
    # How many clusters the requester has asked for.
    "CREATE TABLE IF NOT EXISTS clusters (id INTEGER PRIMARY KEY, count INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS plan (stage INTEGER PRIMARY KEY, node_id TEXT NOT NULL)",
    # The replicas that were announced last, as `replicas.surviving.AnnouncedReplica` writes them.
    "CREATE TABLE IF NOT EXISTS replicas (id INTEGER PRIMARY KEY, announced TEXT NOT NULL)",
    # Who held which stage, as `standing.DeploymentRecord` writes it, and whether that was changing.
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
    """A connection to the store. It may be used from any thread; RunError when the file cannot be used."""

    def __init__(self, path: Path = IN_MEMORY) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            if path != IN_MEMORY:
                # Before SQLite makes it: its journals take over the mode of the file. One that is there is not opened
                # here: closing it again would drop the locks of this process's other connections to it.
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
        """Let go of the file; may be called again."""
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
        """The same, and all of the block is done or nothing of it."""
        with self.used() as connection:
            # IMMEDIATE: no other process writes between our look and our writing.
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

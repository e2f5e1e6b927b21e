"""Invite tokens and the nodes that joined with them, in the run's SQLite store.

The store holds the public root of each token and not its secret, so a copy of it admits no node. Other processes write
to it (`ravnest invite --revoke`, `ravnest kick`). Nothing is cached: a read takes microseconds, so that their changes
hold from the next handshake or call on.
"""

import sqlite3
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ravnest.coordinator.access.store import IN_MEMORY, Store
from ravnest.errors import RefusedError, RunError
from ravnest.net.identity.certificates import Certificate, certificate_der, read_certificate
from ravnest.net.identity.identity import as_node_id
from ravnest.net.identity.invite_key import InviteToken

DEFAULT_USES: Final = 20
"""Default number of machines that an invite admits: enough for a group of friends. A stolen invite gives as many
identities."""
DEFAULT_LIFETIME_SECONDS: Final = 7 * 86400.0


def uses_for(providers: int | None) -> int:
    """Uses of a run's invite: twice the number of machines that the run waits for, since machines are replaced."""
    return max(DEFAULT_USES, 2 * (providers or 0))


@dataclass(frozen=True, slots=True)
class Token:
    """Row of a token. `uses_left` is None without a limit, `expires_at` None for a token that does not expire."""

    id: str
    uses_left: int | None
    expires_at: float | None
    revoked_at: float | None
    created_at: float
    note: str


@dataclass(frozen=True, slots=True)
class AdmittedNode:
    """A node that has joined, and its token. `kicked_at` is None unless the node was kicked."""

    node_id: str
    token_id: str
    joined_at: float
    kicked_at: float | None


def admit(token: Token | None, now: float, returning: bool = False) -> tuple[bool, str]:
    """Whether a holder of this token may join, and why. None is an unknown token. A key that is `returning` has joined
    before, and uses nothing up."""
    if token is None:
        return False, "the invite is not one of this swarm; ask the requester for a new invite"
    if token.revoked_at is not None:
        return False, f"the invite {token.id} was revoked; ask the requester for a new invite"
    if token.expires_at is not None and token.expires_at <= now:
        when = datetime.fromtimestamp(token.expires_at, UTC)
        return False, f"the invite {token.id} expired at {when:%Y-%m-%d %H:%M} UTC; ask the requester for a new invite"
    if returning:
        return True, f"a node that has joined before returns with invite {token.id}"
    if token.uses_left is not None and token.uses_left <= 0:
        return False, f"the invite {token.id} has been used up; ask the requester for a new invite"
    left = "any number of" if token.uses_left is None else str(token.uses_left - 1)
    return True, f"invite {token.id} is good, with {left} uses left after this one"


class TokenStore:
    """Tables of one swarm. All methods are thread-safe; RunError when the store cannot be used."""

    def __init__(self, path: Path = IN_MEMORY) -> None:
        self._store = Store(path)

    def close(self) -> None:
        """Closes the file; idempotent."""
        self._store.close()

    def create(
        self,
        now: float,
        uses: int | None = DEFAULT_USES,
        lifetime_seconds: float | None = DEFAULT_LIFETIME_SECONDS,
        note: str = "",
    ) -> InviteToken:
        """Creates a token. Its secret is in the result alone."""
        token = InviteToken.new()
        root = certificate_der(token.root(now))
        expires_at = None if lifetime_seconds is None else now + lifetime_seconds
        with self._store.used() as connection:
            connection.execute(
                "INSERT INTO tokens (id, root, uses_left, expires_at, created_at, note) VALUES (?, ?, ?, ?, ?, ?)",
                (token.id, root, uses, expires_at, now, note),
            )
        return token

    def revoke(self, token_id: str, now: float) -> None:
        """Revokes a token; nodes that have joined with it stay. RunError for an unknown token."""
        with self._store.used() as connection:
            found = connection.execute(
                "UPDATE tokens SET revoked_at = COALESCE(revoked_at, ?) WHERE id = ?", (now, token_id)
            )
            if found.rowcount == 0:
                raise RunError(f"there is no invite {token_id} in this run; `ravnest invite` lists those there are")

    def tokens(self) -> list[Token]:
        """All tokens, oldest first."""
        with self._store.used() as connection:
            rows = connection.execute(f"SELECT {_TOKEN_FIELDS} FROM tokens ORDER BY created_at, id").fetchall()
        return [Token(*row) for row in rows]

    def token(self, token_id: str) -> Token | None:
        """A token, live or not; None if it is unknown."""
        with self._store.used() as connection:
            row = connection.execute(f"SELECT {_TOKEN_FIELDS} FROM tokens WHERE id = ?", (token_id,)).fetchone()
        return None if row is None else Token(*row)

    def live_roots(self, now: float) -> list[Certificate]:
        """Roots that a handshake accepts now. A token that is used up is among them, so that a join can be repeated."""
        with self._store.used() as connection:
            rows = connection.execute(
                "SELECT root FROM tokens WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ?) "
                "ORDER BY created_at, id",
                (now,),
            ).fetchall()
        return [read_certificate(root) for (root,) in rows]

    def root(self, token_id: str) -> Certificate | None:
        """The root of a token, live or not; None if it is unknown."""
        with self._store.used() as connection:
            row = connection.execute("SELECT root FROM tokens WHERE id = ?", (token_id,)).fetchone()
        return None if row is None else read_certificate(row[0])

    def redeem(self, token_id: str, key_id: str, name: str, now: float) -> str:
        """Admits the holder of a key; the node id, which is like `name`. PeerError with the reason of a refusal.

        A key that has joined before keeps its node id, and uses nothing up.
        """
        with self._store.transaction() as connection:
            row = connection.execute(f"SELECT {_TOKEN_FIELDS} FROM tokens WHERE id = ?", (token_id,)).fetchone()
            known = connection.execute("SELECT node_id FROM nodes WHERE key_id = ?", (key_id,)).fetchone()
            if known is not None and not _is_member(connection, known[0]):
                raise RefusedError(f"{known[0]} was thrown out of the swarm; ask the requester for a new invite")
            good, reason = admit(None if row is None else Token(*row), now, returning=known is not None)
            if not good:
                raise RefusedError(reason)
            if known is not None:
                return str(known[0])
            node_id = _free_node_id(connection, as_node_id(name))
            connection.execute("UPDATE tokens SET uses_left = uses_left - 1 WHERE id = ?", (token_id,))
            connection.execute(
                "INSERT INTO nodes (node_id, key_id, token_id, joined_at) VALUES (?, ?, ?, ?)",
                (node_id, key_id, token_id, now),
            )
            return node_id

    def kick(self, node_id: str, now: float, reason: str = "") -> None:
        """Kicks a node for good: its certificate is no longer valid here. RunError for an unknown node."""
        with self._store.used() as connection:
            found = connection.execute(
                "UPDATE nodes SET kicked_at = COALESCE(kicked_at, ?), kick_reason = ? WHERE node_id = ?",
                (now, reason, node_id),
            )
            if found.rowcount == 0:
                raise RunError(f"there is no node {node_id} in this run; `ravnest invite` lists those there are")

    def is_known(self, key_id: str) -> bool:
        """Whether the holder of this key has joined before, kicked or not."""
        with self._store.used() as connection:
            return connection.execute("SELECT 1 FROM nodes WHERE key_id = ?", (key_id,)).fetchone() is not None

    def is_member(self, node_id: str) -> bool:
        """Whether this node has joined and was not kicked."""
        with self._store.used() as connection:
            return _is_member(connection, node_id)

    def nodes(self) -> list[AdmittedNode]:
        """All nodes that have joined, oldest first."""
        with self._store.used() as connection:
            rows = connection.execute(
                "SELECT node_id, token_id, joined_at, kicked_at FROM nodes ORDER BY joined_at, node_id"
            ).fetchall()
        return [AdmittedNode(*row) for row in rows]

    def kicked(self) -> dict[str, str]:
        """The kicked nodes, each with the reason."""
        with self._store.used() as connection:
            query = "SELECT node_id, kick_reason FROM nodes WHERE kicked_at IS NOT NULL"
            return dict(connection.execute(query).fetchall())

    def advertise(self, host: str, port: int) -> None:
        """Stores the address for invites that other processes make."""
        with self._store.used() as connection:
            connection.execute("INSERT OR REPLACE INTO coordinator (id, host, port) VALUES (0, ?, ?)", (host, port))

    def advertised(self) -> tuple[str, int]:
        """The address in invites. RunError before the coordinator has listened."""
        with self._store.used() as connection:
            row = connection.execute("SELECT host, port FROM coordinator").fetchone()
        if row is None:
            raise RunError("this run's coordinator has never listened; start it with `ravnest serve`")
        return str(row[0]), int(row[1])


_TOKEN_FIELDS: Final = "id, uses_left, expires_at, revoked_at, created_at, note"


def _is_member(connection: sqlite3.Connection, node_id: str) -> bool:
    row: Any = connection.execute("SELECT kicked_at FROM nodes WHERE node_id = ?", (node_id,)).fetchone()
    return row is not None and row[0] is None


def _free_node_id(connection: sqlite3.Connection, wanted: str) -> str:
    # An id is never used twice in a run, because a certificate for its earlier node may still exist.
    taken = {node_id for (node_id,) in connection.execute("SELECT node_id FROM nodes")}
    number, node_id = 1, wanted
    while node_id in taken:
        number += 1
        node_id = f"{wanted}-{number}"
    return node_id

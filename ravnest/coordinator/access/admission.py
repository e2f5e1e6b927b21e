"""Admission of nodes: the coordinator's certificate authority and its invite tokens."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ravnest.coordinator.access.invites import DEFAULT_LIFETIME_SECONDS, DEFAULT_USES, TokenStore, admit
from ravnest.coordinator.access.steady_clock import SteadyClock
from ravnest.errors import PeerError, RunError
from ravnest.monitor.run_directory import RunPaths, existing_run
from ravnest.net.identity.authority import SwarmAuthority
from ravnest.net.identity.certificates import certificate_der, key_id, request_key
from ravnest.net.identity.identity import AuthContext, Callers, Identity, Kind
from ravnest.net.identity.swarm_invite import SwarmInvite
from ravnest.net.identity.tls import TlsKeys, server_credentials

if TYPE_CHECKING:
    import grpc


@dataclass(frozen=True, slots=True)
class Admitted:
    """An admitted node: its id, and its certificate in DER."""

    node_id: str
    certificate: bytes


class Admission:
    """Decides which nodes may join, and which calls each may make.

    The lifetime of an invite does not depend on changes of the machine's clock. Certificates carry the machine's time,
    because other machines compare it with theirs. `clock` replaces both; it returns seconds since the epoch.
    """

    def __init__(self, authority: SwarmAuthority, tokens: TokenStore, clock: Callable[[], float] | None = None) -> None:
        self.authority = authority
        self.tokens = tokens
        self._clock = clock or SteadyClock()
        self._date = clock or (lambda: time.time())
        self._callers = Callers(authority.certificate, tokens.root, tokens.is_member)

    @classmethod
    def open(cls, run: Path) -> Self:
        """The admission of the run in this folder, created at the first call. RunError if the folder cannot be used."""
        paths = RunPaths(run)
        return cls(SwarmAuthority.open(paths.identity_path), TokenStore(paths.store_path))

    @classmethod
    def of_run(cls, run: Path) -> Self:
        """The admission of a served run, for a process other than the coordinator. RunError for another run."""
        paths = existing_run(run)
        if not paths.store_path.exists():
            raise RunError(f"{run} has no invites: it was not begun with `ravnest serve`")
        return cls.open(run)

    @classmethod
    def in_memory(cls) -> Self:
        """The admission of a swarm that ends with its process."""
        return cls(SwarmAuthority.new(), TokenStore())

    def close(self) -> None:
        """Closes the store; idempotent."""
        self.tokens.close()

    def invite(
        self,
        host: str,
        port: int,
        uses: int | None = DEFAULT_USES,
        lifetime_seconds: float | None = DEFAULT_LIFETIME_SECONDS,
        note: str = "",
    ) -> SwarmInvite:
        """A new invite to the coordinator at this address."""
        token = self.tokens.create(self._clock(), uses, lifetime_seconds, note)
        return SwarmInvite(host, port, token, self.authority.fingerprint)

    def server_credentials(self) -> "grpc.ServerCredentials":
        """Credentials of the coordinator's port, which accepts nodes of the swarm and holders of live invites."""
        return server_credentials(self.server_keys)

    def caller(self, auth_context: AuthContext, kinds: Collection[Kind], call: str) -> Identity:
        """The caller's identity. PeerError for an unknown caller, or one that may not make this call."""
        identity = self._callers.caller(auth_context, kinds, call)
        if identity.kind == "invite" and call == "Measure":
            # Messages of this call may be as large as a node's, so the invite must be able to admit one.
            good, reason = self.check(identity)
            if not good:
                raise PeerError(reason)
        return identity

    def check(self, identity: Identity) -> tuple[bool, str]:
        """Whether this caller could join now, and why; uses nothing up."""
        if identity.kind == "invite":
            return admit(self.tokens.token(identity.name), self._clock())
        return True, f"{identity} has joined before and needs no invite"

    def is_new(self, identity: Identity, request: bytes) -> bool:
        """Whether `join` would admit a node for the first time. PeerError for a malformed request."""
        return identity.kind == "invite" and not self.tokens.is_known(key_id(request_key(request)))

    def join(self, identity: Identity, request: bytes, name: str) -> Admitted:
        """Admits the holder of an invite, or gives a node a new certificate. PeerError with the reason of a refusal."""
        key = request_key(request)
        if identity.kind == "invite":
            node_id = self.tokens.redeem(identity.name, key_id(key), name, self._clock())
        else:
            assert identity.kind == "node", "the coordinator does not join its own swarm"
            node_id = identity.name
        return Admitted(node_id, certificate_der(self.authority.issue(request, node_id, now=self._date())))

    def server_keys(self) -> TlsKeys:
        """The certificate of the coordinator's port, and the roots that it trusts now."""
        return self.authority.tls_keys(self.tokens.live_roots(self._clock()))

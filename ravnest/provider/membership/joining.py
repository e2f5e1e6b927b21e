"""Joining a swarm with an invite, and the identity that this machine stores for the next time."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ravnest.errors import PeerError, RavnestError, RunError
from ravnest.net.identity.certificates import Certificate
from ravnest.net.identity.identity import as_node_id
from ravnest.net.identity.node_identity import CERTIFICATE_FILE, NodeIdentity, joiner_keys
from ravnest.net.identity.private_files import make_private_folder
from ravnest.net.identity.swarm_invite import SwarmInvite
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.v1.control_pb2 import JoinReply, JoinRequest

_MAX_ON_ONE_MACHINE = 256


async def join(
    invite: SwarmInvite, authority: Certificate, node: NodeIdentity, request: JoinRequest
) -> tuple[CoordinatorClient, JoinReply]:
    """Join, and return a connection that uses the node's own certificate.

    A node that has joined before shows its certificate, so that it may come back after its invite has ended. Any other
    node shows the invite. PeerError says why the coordinator does not admit it.
    """
    if node.joined and node.expires_at > time.time():
        client = CoordinatorClient(invite.address, node.tls_keys(), f"the certificate of {node.node_id}")
    else:
        client = CoordinatorClient(invite.address, joiner_keys(invite.token, authority), "this invite")
    try:
        request.certificate_request = node.request()
        reply = await client.join(request)
    finally:
        await client.close()
    node.adopt(reply.certificate, authority)
    if node.node_id != reply.node_id:
        raise PeerError(f"the coordinator calls this node {reply.node_id}, its certificate {node.node_id}; join again")
    return CoordinatorClient(invite.address, node.tls_keys(), f"the certificate of {node.node_id}"), reply


@contextmanager
def kept_identity(invite: SwarmInvite, authority: Certificate, name: str) -> Iterator[NodeIdentity]:
    """The identity of this machine in the swarm under this name, stored in a folder of the user.

    Several providers on one machine are several nodes: a folder that another process uses is skipped. RunError when no
    folder can be used.
    """
    swarm = _swarm_folder(invite)
    for number in range(1, _MAX_ON_ONE_MACHINE + 1):
        folder = swarm / (as_node_id(name) + (f"-{number}" if number > 1 else ""))
        make_private_folder(folder)
        descriptor = _held(folder / "lock")
        if descriptor is not None:
            try:
                yield NodeIdentity.open(folder, authority)
                return
            finally:
                os.close(descriptor)
    raise RunError(f"{_MAX_ON_ONE_MACHINE} providers of this machine are in the swarm already; use another --name")


def known_identity(invite: SwarmInvite, authority: Certificate) -> NodeIdentity | None:
    """An identity with which this machine has joined the swarm before, for reading only; None if there is none."""
    with suppress(RunError):
        for path in sorted(_swarm_folder(invite).glob(f"*/{CERTIFICATE_FILE}")):
            with suppress(RavnestError):
                identity = NodeIdentity.open(path.parent, authority)
                if identity.joined:
                    return identity
    return None


def has_joined_before(invite: SwarmInvite) -> bool:
    """Whether this machine has a certificate of the swarm, valid or not."""
    with suppress(RunError):
        return any(_swarm_folder(invite).glob(f"*/{CERTIFICATE_FILE}"))
    return False


def data_folder() -> Path:
    """The folder for the data of this user's programs; RunError if there is none."""
    given = Path(os.environ.get("XDG_DATA_HOME", ""))
    if given.is_absolute():
        return given
    with suppress(RuntimeError):
        return Path.home() / ".local" / "share"
    raise RunError("this user has no home folder to keep the node's key in; set XDG_DATA_HOME to a folder of its own")


def _swarm_folder(invite: SwarmInvite) -> Path:
    return data_folder() / "ravnest" / "nodes" / invite.fingerprint[:8].hex()


def _held(path: Path) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise RunError(f"cannot use {path}: {error.strerror or error}; check the folder's owner") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor

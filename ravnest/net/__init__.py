"""The transport: frames, tensor codecs, invites and gRPC. No torch.nn."""

import os

# gRPC prints notes of its own to the terminal, about peers that say goodbye for example; its errors still show.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# The requester's data loader forks its workers out of this process. With gRPC's own handling of forks a worker would
# wake up with our connections and break them, or abort; a worker that leaves them alone is all we need.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from ravnest.net.address import join_address, split_address
from ravnest.net.client import CoordinatorClient, dial_link
from ravnest.net.frames import Frame, FrameKind, FrameLimits, decode, encode
from ravnest.net.link import Control, Link
from ravnest.net.node_identity import NodeIdentity
from ravnest.net.server import CoordinatorHandler, CoordinatorServer, ProviderHandler, ProviderServer
from ravnest.net.swarm_invite import SwarmInvite

__all__ = [
    "Control",
    "CoordinatorClient",
    "CoordinatorHandler",
    "CoordinatorServer",
    "Frame",
    "FrameKind",
    "FrameLimits",
    "Link",
    "NodeIdentity",
    "ProviderHandler",
    "ProviderServer",
    "SwarmInvite",
    "decode",
    "dial_link",
    "encode",
    "join_address",
    "split_address",
]

"""The transport: frames, tensor codecs, invites and gRPC. No torch.nn."""

import os

# gRPC prints notes of its own to the terminal, about peers that say goodbye for example; its errors still show.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# The requester's data loader forks its workers out of this process. With gRPC's own handling of forks a worker would
# wake up with our connections and break them, or abort; a worker that leaves them alone is all we need.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from ravnest.net.client import CoordinatorClient, dial_link
from ravnest.net.credentials import Credentials, same_secret
from ravnest.net.frames import Frame, FrameKind, FrameLimits, decode, encode
from ravnest.net.invite import Invite, join_address, split_address
from ravnest.net.link import Control, Link
from ravnest.net.server import CoordinatorHandler, CoordinatorServer, ProviderHandler, ProviderServer

__all__ = [
    "Control",
    "CoordinatorClient",
    "CoordinatorHandler",
    "CoordinatorServer",
    "Credentials",
    "Frame",
    "FrameKind",
    "FrameLimits",
    "Invite",
    "Link",
    "ProviderHandler",
    "ProviderServer",
    "decode",
    "dial_link",
    "encode",
    "join_address",
    "same_secret",
    "split_address",
]

"""The transport: frames, tensor codecs, invites and gRPC. No torch.nn."""

import os

# gRPC prints notes of its own to the terminal, about peers that say goodbye for example; its errors still show.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# The requester's data loader forks its workers out of this process. With gRPC's own handling of forks a worker would
# wake up with our connections and break them, or abort; a worker that leaves them alone is all we need.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

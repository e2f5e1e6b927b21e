"""Net: the transport between nodes: frames, identities, gRPC streams and calls.

May know torch's tensors, graph signatures of values and the codecs. Knows nothing of modules, stages, jobs or plans.
"""

import os

# gRPC prints notes to the terminal, for example about peers that close a connection. Its errors still show.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# The requester's data loader forks its workers from this process. With gRPC's own handling of forks a worker would wake
# up with our connections, and break them or abort. Workers do not need the connections.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

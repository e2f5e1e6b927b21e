"""The machine that hosts a stage, as its stages see it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ravnest.engine.speed.pretended_pace import NO_PRETENCE, Pretence
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.provider.replicas.outgoing import OutgoingTransfers


@dataclass(frozen=True)
class Host:
    """Everything about this provider that a hosted stage needs, and that outlives the stage."""

    node: NodeIdentity
    device: torch.device
    lent_bytes: int
    """Memory that the owner of the machine lends to a stage."""
    baseline_bytes: int = 0
    """Memory that the process held before it hosted a stage."""
    pretence: Pretence = NO_PRETENCE
    """The slower machine that this provider pretends to be, in tests and benchmarks."""
    say: Callable[[str], None] = lambda text: None
    """Prints a line for the user of this machine."""
    transfers: OutgoingTransfers = field(default_factory=OutgoingTransfers)
    """Transfers of state under way; the heartbeat reports them."""

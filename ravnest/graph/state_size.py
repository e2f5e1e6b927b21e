"""Size limits of a stage: its graph as text, and its state as a part of a checkpoint or replica.

The coordinator and the providers apply the same limits, so that neither sends what the other one refuses.
"""

import math
from typing import Final

from ravnest.graph.portable import PortableGraph

MAX_GRAPH_BYTES: Final = 256 << 20
"""Maximum size of a stage's graph, which is held in memory as text."""
MAX_STATE_VALUES: Final = 4_000_000
"""Maximum number of plain values in the state of a stage's optimizer."""
_SPARE_BYTES: Final = 64 << 20
_STATE_FACTOR: Final = 16
"""Optimizers keep one to three tensors for each parameter."""


def weight_bytes(graph: PortableGraph) -> int:
    """The size of the weights of a stage that training changes."""
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in (*graph.parameters, *graph.states))


def max_state_bytes(graph: PortableGraph) -> int:
    """The maximum size of a stage's state, with the state of its optimizer."""
    return _SPARE_BYTES + _STATE_FACTOR * weight_bytes(graph)

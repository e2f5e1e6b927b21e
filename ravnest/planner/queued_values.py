"""Queued values: the inputs, activations and gradients that a stage holds besides what autograd saves.

Each microbatch in flight may be at any one stage of its cluster: all of them may wait in front of the slowest one, or
behind it for its line.
"""

import numpy as np

from ravnest.planner.model_costs import ModelCosts, Table


def queued_bytes(model: ModelCosts, in_flight: int) -> Table:
    """Bytes of the values that a stage from place i to place j holds, with this many microbatches in flight.

    A stage holds what it received and was fed for a microbatch from its arrival until the backward, also on a leaf,
    where microbatches wait for their turn; looked-up rows are received by a root. It holds what it sends on from the
    forward until the backward, whose roots these values are. In addition, one frame in each direction of each link is
    being packed or unpacked, and sent.
    """
    forward, backward = model.forward_bytes, model.backward_bytes
    held = forward[:, None] + model.fed_bytes + forward[None, :]
    passing = (forward + backward)[:, None] + (forward + backward)[None, :]
    if model.rows_bytes:
        places = np.arange(len(model.places))
        is_root = (places == 0)[:, None] & (places < model.last)[None, :]
        is_leaf = (places > 0)[:, None] & (places == model.last)[None, :]
        held = held + model.rows_bytes * is_root
        passing = passing + 2 * model.rows_bytes * (is_root | is_leaf)
    queued: Table = np.triu(in_flight * held + passing, 1)
    return queued

"""Codings of a stage's state on a line, by name, and the form that each gives to a tensor.

| coding | parameters | moments | bytes per parameter, Adam |
|---|---|---|---:|
| float32 | unchanged: the file as it is | unchanged | 12 |
| lossless | bit for bit, as differences to the receiver's copy | bit for bit | 8 to 10 |
| int8 | differences to the receiver's copy in int8; bit for bit without one | log8 | 3.1; 5.5 without a copy |

Everything else (counters, the outer optimizer's state, anchors, buffers, small tensors) is bit for bit in all codings.
An anchor must have the same value in all clusters. A parameter without a copy at the receiver is not rounded: the
rounding would be larger than several updates.
"""

import enum
from typing import Final

from ravnest.errors import PeerError

EXACT: Final = "float32"
LOSSLESS: Final = "lossless"
INT8: Final = "int8"
STATE_CODINGS: Final = (EXACT, LOSSLESS, INT8)

MIN_VALUES: Final = 4096
"""Smaller tensors are bit for bit: norms and biases matter most, and are few bytes."""

_SIGNED: Final = frozenset({"exp_avg", "momentum_buffer"})
_SQUARES: Final = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg"})


class Treatment(enum.Enum):
    """How the values of one tensor may be changed."""

    EXACT = "not at all"
    DIFFERENCE = "rounded difference to the receiver's copy"
    SIGNED = "moment with a sign"
    SQUARES = "mean of squares"


def check_coding(name: str) -> str:
    """The name of a coding that a peer has sent, with the empty name for the plain one; PeerError if it is unknown."""
    if name and name not in STATE_CODINGS:
        raise PeerError(f"there is no coding {name[:80]!r} of state; use one of {', '.join(STATE_CODINGS)}")
    return name or EXACT


def treatment(coding: str, name: str, values: int) -> Treatment:
    """The treatment of a float32 tensor of a part by its name, as `Stage.state` names it."""
    if coding != INT8 or values < MIN_VALUES:
        return Treatment.EXACT
    kind, _, key = name.partition(":")
    if kind == "param":
        return Treatment.DIFFERENCE
    entry = key.rpartition(":")[2] if kind == "optim" else ""
    if entry in _SIGNED:
        return Treatment.SIGNED
    return Treatment.SQUARES if entry in _SQUARES else Treatment.EXACT

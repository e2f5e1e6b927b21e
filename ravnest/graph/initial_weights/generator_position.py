"""Position of PyTorch's random generator on the CPU, in half the bytes of its own state.

The state of the Mersenne Twister is 624 words of 32 bits and the number of those already used. PyTorch stores each word
in 8 bytes, and some fields that draws of many values do not use. A position from a peer is checked: PyTorch itself
would read outside of the words if the numbers disagreed.
"""

import sys
from typing import Final

import numpy as np
import torch

from ravnest.errors import GraphError

_WORDS: Final = 624
POSITION_BYTES: Final = 4 * _WORDS + 4
_STATE_BYTES: Final = 5056
_LEFT, _NEXT, _FIRST_WORD = 8, 16, 24
"""Offsets in PyTorch's state: the words that are left, the next one, and the words."""


def position_of(generator: torch.Generator) -> bytes:
    """The position of a generator of the CPU; GraphError if this PyTorch keeps it in another form."""
    state = generator.get_state().numpy()
    if state.nbytes != _STATE_BYTES or sys.byteorder != "little":
        raise GraphError(f"the state of PyTorch's generator has {state.nbytes} bytes, not {_STATE_BYTES}")
    left = int(state[_LEFT : _LEFT + 4].view(np.int32)[0])
    following = int(state[_NEXT : _NEXT + 8].view(np.uint64)[0])
    words = state[_FIRST_WORD : _FIRST_WORD + 8 * _WORDS].view(np.uint64).astype(np.uint32)
    return left.to_bytes(2, "little") + following.to_bytes(2, "little") + words.tobytes()


def check_position(position: bytes) -> tuple[int, int]:
    """The words that are left and the next one; GraphError if there is no such position. This does not depend on the
    PyTorch of this machine."""
    if len(position) != POSITION_BYTES:
        raise GraphError(f"the position of a generator has {len(position)} bytes, not {POSITION_BYTES}")
    left, following = (int.from_bytes(position[i : i + 2], "little") for i in (0, 2))
    if (left, following) != (1, 0) and not (1 <= left <= _WORDS and left + following == _WORDS + 1):
        raise GraphError(f"the position of a generator has {left} words left and continues at word {following}")
    return left, following


def generator_at(position: bytes) -> torch.Generator:
    """A new generator at this position; GraphError if there is no such position, or if this PyTorch keeps it in another
    form."""
    left, following = check_position(position)
    generator = torch.Generator()
    generator.manual_seed(0)
    state = generator.get_state().numpy()
    if state.nbytes != _STATE_BYTES or sys.byteorder != "little":
        raise GraphError(f"the state of PyTorch's generator has {state.nbytes} bytes, not {_STATE_BYTES}")
    state[_LEFT : _LEFT + 4].view(np.int32)[0] = left
    state[_NEXT : _NEXT + 8].view(np.uint64)[0] = following
    state[_FIRST_WORD : _FIRST_WORD + 8 * _WORDS].view(np.uint64)[:] = np.frombuffer(position[4:], np.uint32)
    generator.set_state(torch.from_numpy(state))
    return generator

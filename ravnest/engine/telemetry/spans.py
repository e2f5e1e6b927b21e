"""Spans: the timed pieces of work and waits of a stage."""

from typing import Final, NamedTuple


class Span(NamedTuple):
    """A piece of work or a wait of a stage, on the clock `time.perf_counter`."""

    # A tuple, because it is fast to create: there are several for every microbatch.

    kind: str
    """forward, backward, weights, update, evaluate, average, save, send, receive or wait."""
    microbatch: int
    """The microbatch of the work; for a wait, the one whose task ended it."""
    began: float
    ended: float
    detail: str = ""
    """"forward" or "backward" for a send or a receive; `WAIT_LIMIT` or `WAIT_NOTHING` for a wait."""


WAIT_LIMIT: Final = "limit"
"""The limit of microbatches in flight is reached: only a gradient can end the wait."""
WAIT_NOTHING: Final = "nothing ready"
"""No task is ready."""

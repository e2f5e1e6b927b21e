"""Spans: pieces of work of a stage, with their times."""

from typing import Final, NamedTuple


class Span(NamedTuple):
    """A piece of work of a stage, on the clock `time.perf_counter`."""

    # A tuple, because some are made for every microbatch: the engine's thread has better things to do.

    kind: str
    """forward, backward, weights, update, evaluate, average, save, send, receive or wait."""
    microbatch: int
    """Of a wait, the one whose work ended it."""
    began: float
    ended: float
    detail: str = ""
    """Of a send or a receive "forward" or "backward"; of a wait `WAIT_LIMIT` or `WAIT_NOTHING`."""


WAIT_LIMIT: Final = "limit"
"""As many microbatches are between forward and backward as may be: only a gradient helps."""
WAIT_NOTHING: Final = "nothing ready"
"""Nothing has come that could be worked on."""

"""Failures of a stage: the first one of each generation counts."""

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageFailure:
    """Why a stage cannot go on, as the coordinator hears it."""

    kind: str
    text: str
    microbatch: int = -1
    """The microbatch that failed; -1 when the failure is not about one."""
    about: str = ""
    """The neighbour that broke the protocol, for a failure of the kind "neighbour"."""


class FirstFailure:
    """Keeps the first failure of a generation. Used on the network's loop.

    Failures that follow, and those reported after `close`, are dropped: they are consequences of the first one, or of
    the shutdown.
    """

    def __init__(self) -> None:
        self.future: asyncio.Future[StageFailure] = asyncio.get_running_loop().create_future()
        """Done once there is a failure."""
        self._is_closed = False

    def report(self, failure: StageFailure) -> None:
        """Record a failure, if it is the first."""
        if not self._is_closed and not self.future.done():
            self.future.set_result(failure)

    def close(self) -> None:
        """Ignore failures from now on: the generation is being shut down."""
        self._is_closed = True

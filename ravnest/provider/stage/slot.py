"""Stage slot: the place for the one stage that a provider hosts, across its sessions with coordinators.

A stage survives the session in which it was deployed. When the coordinator is gone, the stage is *left over*: a
restarted coordinator may resume it, and otherwise the provider gives it up.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from ravnest.net.direct_line import DirectLine
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.v1.control_pb2 import Neighbour
from ravnest.provider.stage.generation import Generation
from ravnest.provider.stage.hosted_stage import HostedStage

LEFT_OVER_SECONDS: Final = 120.0
"""Time for which a left-over stage waits for a coordinator to resume it."""


class StageSlot:
    """Holds the hosted stage, if there is one. Used on the network's loop, but for `take_direct`."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` prints lines for the user."""
        self.has_session = False
        """Whether there is a session with a coordinator."""
        self.on_neighbours: Callable[[Collection[str]], None] = lambda neighbours: None
        """Called with the nodes that may dial in because of the stage."""
        self.hosted: HostedStage | None = None
        self.is_left_over = False
        """Whether the stage was deployed in an earlier session, and has not been resumed."""
        self.ordered_generation = 0
        """The generation of the newest order; frames of earlier ones are dropped."""
        self._neighbours: Collection[str] = ()
        self._say = say
        self._changed = asyncio.Condition()

    def is_neighbour(self, node_id: str) -> bool:
        """Whether this node may dial in because of the stage."""
        return node_id in self._neighbours

    def allow(self, neighbours: Collection[str]) -> None:
        """Let these nodes dial in, which may happen before the stage is built."""
        self._neighbours = neighbours
        self.on_neighbours(neighbours)

    async def put(self, hosted: HostedStage) -> None:
        """Host this stage, or note that the one that is here has a new generation."""
        async with self._changed:
            self.hosted, self.is_left_over = hosted, False
            self._changed.notify_all()

    async def next_stage(self, after: Generation | None = None) -> HostedStage:
        """The hosted stage, as soon as it has another generation than `after`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.hosted is not None and self.hosted.generation is not after)
        assert self.hosted is not None
        return self.hosted

    def take_direct(self, line: DirectLine) -> None:
        """Take what another owner of a ring sends over a direct line. On a thread of the line's own."""
        hosted = self.hosted
        if hosted is not None:
            hosted.take_direct(line)

    def meet_owners(self, deployment: str, peers: Iterable[Neighbour], client: CoordinatorClient) -> None:
        """Take these as the other owners of the stage's rings, if the stage is of this deployment."""
        if self.hosted is not None and self.hosted.name == deployment:
            self.hosted.meet_owners(peers, client)
            self.allow(self.hosted.neighbours)

    def on_session_end(self) -> None:
        """The session with the coordinator is over: the stage, if there is one, waits for the next coordinator."""
        self.has_session, self.is_left_over = False, self.hosted is not None
        if self.hosted is not None:
            self.hosted.on_coordinator_gone()

    async def give_up(self) -> None:
        """End the stage, if there is one."""
        hosted, self.hosted, self.is_left_over = self.hosted, None, False
        self.allow(())
        if hosted is not None:
            await hosted.close()
            if late := hosted.overruns:
                self._say(f"{late} forwards and backwards took longer than this machine pretends")

    async def give_up_left_over(self, keys: Sequence[str] = ()) -> None:
        """End a left-over stage, unless one of the keys that the run uses is of its deployment."""
        hosted = self.hosted
        if self.is_left_over and hosted is not None and not any(k.startswith(f"{hosted.name}-") for k in keys):
            await self.give_up()

    async def expire_left_over(self) -> None:
        """End a left-over stage that no coordinator has resumed in time."""
        await asyncio.sleep(LEFT_OVER_SECONDS)
        await self.give_up_left_over()

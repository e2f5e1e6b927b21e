"""Deployment of a stage to this provider: build a new stage, or keep the one that is here with new neighbours.

Whatever goes wrong, the coordinator hears why there is no stage: with the kind "memory" when memory is exhausted,
"no_part" when the part of a replica that the stage starts from cannot be had, and "deploy" otherwise.
"""

import asyncio

from ravnest.engine.out_of_memory import is_out_of_memory, out_of_memory_text
from ravnest.errors import PeerError, error_text
from ravnest.net.v1.control_pb2 import Deploy, Failed, ProviderMessage
from ravnest.provider.console import Console
from ravnest.provider.fetch.artifacts import Artifacts
from ravnest.provider.fetch.progress import fetching
from ravnest.provider.machine.warm_up import warm_up
from ravnest.provider.membership.session import SwarmSession
from ravnest.provider.replicas.format import joined
from ravnest.provider.replicas.service import ReplicaService
from ravnest.provider.stage.build import build_stage
from ravnest.provider.stage.host import Host
from ravnest.provider.stage.hosted_stage import HostedStage
from ravnest.provider.stage.slot import StageSlot


class _NoPartError(PeerError):
    """The part of a replica that the stage starts from cannot be had here; another provider may have it."""


class StageDeployer:
    """Carries out the orders of one session to host a stage."""

    def __init__(
        self,
        session: SwarmSession,
        host: Host,
        slot: StageSlot,
        parts: ReplicaService,
        artifacts: Artifacts,
        console: Console,
    ) -> None:
        self._session = session
        self._host = host
        self._slot = slot
        self._parts = parts
        self._artifacts = artifacts
        self._console = console

    async def deploy(self, order: Deploy) -> None:
        """Host the stage of this order, and tell the coordinator when it is ready or why it cannot be."""
        try:
            # First of all: frames for the previous generation are dropped from now on.
            self._slot.ordered_generation = order.generation
            warming = asyncio.create_task(asyncio.to_thread(warm_up))
            hosted = await (self._keep(order) if order.keep else self._build(order))
            if order.key:
                hosted.on_keep = self._parts.recorder(order)
            self._slot.allow(hosted.neighbours)
            ready = hosted.ready()
            await self._slot.put(hosted)
            await warming
            hosted.open(self._session.feed, self._session.control.send)
            await self._session.control.send(ProviderMessage(ready=ready))
        except Exception as error:
            await self._session.control.send(ProviderMessage(failed=_failed(order, error)))

    async def _build(self, order: Deploy) -> HostedStage:
        """Build the stage from the coordinator's artifacts, or from parts of a replica."""
        await self._slot.give_up()
        self._console.say(f"taking stage {order.stage + 1} of {order.stages}")
        self._slot.allow({n.node for n in (order.previous, order.next, *order.ring_peers) if n.node})
        part = None
        if order.part_key or order.donors:
            try:
                part = (
                    await self._parts.fetch_part(order)
                    if order.part_key
                    else joined(await self._parts.fetch_all_parts(order))
                )
            except PeerError as error:
                raise _NoPartError(str(error)) from None
        async with fetching(order, self._session.control, self._console.fetch_line) as progress:
            return await build_stage(order, self._session.client, self._host, self._artifacts, progress, part)

    async def _keep(self, order: Deploy) -> HostedStage:
        """Go on with the stage that is here, with other neighbours."""
        hosted = self._slot.hosted
        if hosted is None:
            raise PeerError(f"stage {order.stage} is to be kept, and this provider holds none")
        await hosted.renew(order, self._session.client)
        return hosted


def _failed(order: Deploy, error: Exception) -> Failed:
    text = error_text(error)
    kind = "no_part" if isinstance(error, _NoPartError) else "deploy"
    if is_out_of_memory(error):
        kind, text = "memory", f"{out_of_memory_text(error)} for the stage ({text})"
    return Failed(deployment=order.deployment, kind=kind, message=text, microbatch=-1, generation=order.generation)

"""Commands of the coordinator: a table that tells which part of the provider carries out which kind of message."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import torch

from ravnest.background import BackgroundTasks
from ravnest.errors import RefusedError
from ravnest.net.v1.control_pb2 import CoordinatorMessage
from ravnest.provider.machine.warm_up import warm_up
from ravnest.provider.membership.link_measurements import PeerMeasuring
from ravnest.provider.membership.session import SwarmSession
from ravnest.provider.replicas.service import ReplicaService
from ravnest.provider.stage.deployer import StageDeployer
from ravnest.provider.stage.hosted_stage import HostedStage
from ravnest.provider.stage.slot import StageSlot

Handler = Callable[[CoordinatorMessage], Awaitable[None]]


class Commands:
    """Carries out the commands of one session. Long ones run in the background, so that `stop` is heard."""

    def __init__(
        self,
        session: SwarmSession,
        slot: StageSlot,
        deployer: StageDeployer,
        parts: ReplicaService,
        measuring: PeerMeasuring,
        background: BackgroundTasks,
        say: Callable[[str], None],
    ) -> None:
        """`background` runs long commands, and is closed when a stage is deployed; `say` prints for the user."""
        self._session = session
        self._slot = slot
        self._deployer = deployer
        self._parts = parts
        self._measuring = measuring
        self._background = background
        self._say = say
        self._ordered_generation = 0
        """The newest generation that was ordered in this session: another coordinator counts from 0 again."""
        self._handlers: Mapping[str, Handler] = {
            "deploy": self._deploy,
            "ring_peers": self._meet_owners,
            "meet": self._meet,
            "hold": self._hold,
            "forget": self._forget,
            "replicate": self._obey_parts,
            "give": self._obey_parts,
            "upload_part": self._obey_parts,
            "measure_peer": self._measure_peer,
            "threads": self._set_threads,
        }
        self._stage_handlers: Mapping[str, Callable[[HostedStage, CoordinatorMessage], None]] = {
            "start": _start,
            "save": _save,
            "trace": _trace,
            "flight": _set_limit,
            "average": _average,
            "ring_begin": _average,
            "ring_catch_up": _average,
            "ring_commit": _average,
            "ring_abort": _average,
        }
        """Commands to the hosted stage. They are ignored when there is none, because it may have been given up."""

    async def obey(self) -> None:
        """Carry out one command after the other, until the coordinator says stop or ends the link."""
        while (message := await self._session.control.receive()) is not None:
            kind = message.WhichOneof("body") or ""
            if kind == "stop":
                trained = 0 if self._slot.hosted is None else self._slot.hosted.samples
                self._say(f"ended: {message.stop.reason}; this machine trained on {trained:,} samples")
                return
            if kind in self._handlers:
                await self._handlers[kind](message)
            elif kind in self._stage_handlers and self._slot.hosted is not None:
                self._stage_handlers[kind](self._slot.hosted, message)

    async def take_feed(self) -> None:
        """Pass the frames of the coordinator's feed to the hosted stage, until the link ends."""
        while (frame := await self._session.feed.receive()) is not None:
            if frame.generation < self._slot.ordered_generation:
                # The frame was under way when the stage was deployed again.
                continue
            if self._slot.hosted is None:
                raise RefusedError("the coordinator fed a provider that holds no stage")
            self._slot.hosted.take_feed(frame)

    async def _deploy(self, message: CoordinatorMessage) -> None:
        order = message.deploy
        if order.generation < self._ordered_generation:
            # The coordinator has given up that deployment, and the order was still under way.
            return
        self._ordered_generation = order.generation
        self._parts.expect(order)
        await self._background.close()
        if order.keep:
            # At once, and not in the background: the next command may already name other owners.
            self._slot.meet_owners(order.deployment, order.ring_peers, self._session.client)
        self._background.spawn(self._deployer.deploy(order))

    async def _meet_owners(self, message: CoordinatorMessage) -> None:
        self._slot.meet_owners(message.ring_peers.deployment, message.ring_peers.peers, self._session.client)

    async def _meet(self, message: CoordinatorMessage) -> None:
        if not self._parts.meet(message.meet.link) and self._slot.hosted is not None:
            self._slot.hosted.meet(message.meet.link)

    async def _hold(self, message: CoordinatorMessage) -> None:
        self._background.spawn(asyncio.to_thread(warm_up))
        self._parts.obey(message)

    async def _forget(self, message: CoordinatorMessage) -> None:
        if not message.forget.of:
            self._background.spawn(self._slot.give_up_left_over(message.forget.keep))
        self._parts.obey(message)

    async def _obey_parts(self, message: CoordinatorMessage) -> None:
        self._parts.obey(message)

    async def _measure_peer(self, message: CoordinatorMessage) -> None:
        self._measuring.take(message.measure_peer)

    async def _set_threads(self, message: CoordinatorMessage) -> None:
        torch.set_num_threads(max(1, message.threads.threads))


def _start(hosted: HostedStage, message: CoordinatorMessage) -> None:
    hosted.connect()


def _save(hosted: HostedStage, message: CoordinatorMessage) -> None:
    hosted.save(message.save)


def _trace(hosted: HostedStage, message: CoordinatorMessage) -> None:
    if message.trace.deployment == hosted.name:
        hosted.trace(message.trace.microbatch)


def _set_limit(hosted: HostedStage, message: CoordinatorMessage) -> None:
    if message.flight.deployment == hosted.name:
        hosted.set_limit(message.flight.in_flight)


def _average(hosted: HostedStage, message: CoordinatorMessage) -> None:
    hosted.average(message)

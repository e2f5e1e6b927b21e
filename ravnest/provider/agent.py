"""The provider: joins a coordinator, takes a stage, works until told to stop.

One asyncio loop speaks with the network; one thread per deployment owns torch. What happens on failure:
- the coordinator cannot be reached or refuses: PeerError, exit code 2;
- the coordinator goes away: the provider gives its stage up and ends;
- the stage fails: the coordinator is told the kind, the reason and the microbatch, and decides.
"""

import asyncio
import contextlib
import os
import platform
import select
import signal
import sys
import time
from typing import Any

import torch

from ravnest import __version__, amounts
from ravnest.errors import PeerError, RavnestError
from ravnest.graph.portable import FORMAT_VERSION
from ravnest.net.address import is_wildcard, join_address, own_address_towards
from ravnest.net.client import CoordinatorClient
from ravnest.net.link import Control, Link
from ravnest.net.measuring import LinkSpeed
from ravnest.net.node_identity import NodeIdentity
from ravnest.net.pinning import pin_authority
from ravnest.net.server import ProviderServer
from ravnest.net.swarm_invite import SwarmInvite
from ravnest.net.v1.control_pb2 import (
    CoordinatorMessage,
    Deploy,
    Failed,
    JoinRequest,
    Leaving,
    ProviderMessage,
    Ready,
    Saved,
)
from ravnest.net.version import PROTOCOL_VERSION
from ravnest.provider.deployment import Deployment
from ravnest.provider.device import choose_device
from ravnest.provider.footprint import give_memory_back, leave_out_the_compiler
from ravnest.provider.joining import join, kept_identity
from ravnest.provider.links import PeerMeasuring, report_link
from ravnest.provider.measuring import core_count, device_name, machine_speed
from ravnest.provider.memory import available_bytes, lent_bytes, resident_bytes

_FIRST_TELL_SECONDS = 2.0
_TELL_SECONDS = 10.0
_PARENT_SECONDS = 2.0
_REPORT_SECONDS = 0.2
"""Least time between two reports: losses come one a microbatch and would otherwise go out one by one."""


def run(
    invite: str,
    *,
    device: str = "auto",
    memory_bytes: int | None = None,
    listen: tuple[str, int] | None = None,
    advertise: tuple[str, int] | None = None,
    name: str | None = None,
    embedded: bool = False,
) -> int:
    """Provides until the run ends; the exit code. A RavnestError says why it could not."""
    leave_out_the_compiler()
    give_memory_back()
    try:
        chosen = choose_device(device)
        if invite == "-":
            # The parent of an embedded provider writes it once its server listens: the slow imports are done by then.
            invite = sys.stdin.readline().strip()
            if embedded and not invite:
                return 1
        agent = _Agent(SwarmInvite.parse(invite), chosen, memory_bytes, name or platform.node(), embedded)
        return asyncio.run(agent.main(listen or ("127.0.0.1" if embedded else "0.0.0.0", 0), advertise))
    except RavnestError as error:
        if not embedded:
            raise
        # The parent reads this, and tells the user once what all its providers may say.
        if not _parent_has_ended():
            print(error, flush=True)
        return error.exit_code


def _parent_has_ended() -> bool:
    """Whether the parent is gone, or going: it stops listening a moment before it closes the pipe."""
    readable, _, _ = select.select([sys.stdin], [], [], _PARENT_SECONDS)
    return bool(readable) and not os.read(sys.stdin.fileno(), 4096)


class _Agent:
    def __init__(
        self, invite: SwarmInvite, device: torch.device, memory_bytes: int | None, name: str, embedded: bool
    ) -> None:
        self._invite = invite
        self._device = device
        self._memory_bytes = lent_bytes(available_bytes(device), memory_bytes)
        self._name = name
        self._node = NodeIdentity.new()
        self._embedded = embedded
        self._baseline = 0
        self._deployment: Deployment | None = None
        self._generation = 0
        self._deployed = asyncio.Condition()
        self._peers: PeerMeasuring | None = None
        self._finished = asyncio.Event()
        self._reason = ""

    async def main(self, listen: tuple[str, int], advertise: tuple[str, int] | None) -> int:
        authority = await pin_authority(self._invite)
        async with contextlib.AsyncExitStack() as stack:
            if self._embedded:
                self._node = NodeIdentity.new()
            else:
                self._node = stack.enter_context(kept_identity(self._invite, authority, self._name))
            server = ProviderServer(self, self._node)
            stack.push_async_callback(server.stop)
            port = await server.start(*listen)
            about_us = JoinRequest(
                name=self._name,
                address=self._address(listen[0], port, advertise),
                device=str(self._device),
                memory_bytes=self._memory_bytes,
                # Several share this machine where it is embedded: its coordinator knows how many.
                threads=0 if self._embedded else torch.get_num_threads(),
                version=__version__,
                protocol=PROTOCOL_VERSION,
                graph_format=FORMAT_VERSION,
            )
            if not self._embedded:
                await self._describe(about_us)
            client, reply = await join(self._invite, authority, self._node, about_us)
            stack.push_async_callback(client.close)
            stack.push_async_callback(self._give_up_stage)
            self._say(f"joined {client.address} as {reply.node_id}, lending {self._device} at {about_us.address}")
            control = await client.control()
            if not self._embedded:
                self._tell_link(await report_link(client, control))
            self._peers = PeerMeasuring(self._node, control)
            stack.push_async_callback(self._peers.close)
            feed = await client.feed()
            self._baseline = resident_bytes()
            return await self._work(server, client, control, feed, reply.heartbeat_seconds)

    async def _describe(self, about_us: JoinRequest) -> None:
        """Measures this machine. Where all are on one machine they are alike, and there is nothing to tell."""
        speed = await machine_speed(self._device, self._memory_bytes)
        about_us.flops_per_second = speed.flops_per_second
        about_us.memory_bytes_per_second = speed.memory_bytes_per_second
        about_us.cores = core_count()
        about_us.device_name = device_name(self._device)
        about_us.measures_link = True
        memory, rate = amounts.gibibytes(self._memory_bytes), amounts.flops(speed.flops_per_second)
        self._say(f"this machine: {self._device}, {amounts.counted(about_us.cores, 'core')}, {memory}, {rate}")

    def _tell_link(self, link: LinkSpeed | None) -> None:
        if link is not None:
            down, up = amounts.megabits(link.down_bytes_per_second), amounts.megabits(link.up_bytes_per_second)
            trip = amounts.milliseconds(link.round_trip_seconds)
            self._say(f"connection to the coordinator: {trip}, {down} Mbit/s down, {up} Mbit/s up")

    def _address(self, listen_host: str, port: int, given: tuple[str, int] | None) -> str:
        """Where neighbouring stages reach this node."""
        if given is not None:
            return join_address(given[0], given[1] or port)
        if is_wildcard(listen_host):
            return join_address(own_address_towards(self._invite.host, self._invite.port), port)
        return join_address(listen_host, port)

    async def _give_up_stage(self) -> None:
        if self._deployment is not None:
            await self._deployment.close()

    async def link(self, peer: str, link: Link) -> None:
        """The stage before dials in; it may do so before the own stage is built."""
        await (await self._next_deployment(None)).serve_previous(link)

    async def _work(
        self,
        server: ProviderServer,
        client: CoordinatorClient,
        control: Control[ProviderMessage, CoordinatorMessage],
        feed: Link,
        heartbeat_seconds: float,
    ) -> int:
        self._watch_for_the_end()
        tasks = [
            asyncio.create_task(self._obey(server, client, control, feed)),
            asyncio.create_task(self._take_feed(feed)),
            asyncio.create_task(self._report(control, heartbeat_seconds)),
            asyncio.create_task(self._finished.wait()),
        ]
        if not self._embedded:
            tasks.append(asyncio.create_task(self._tell_progress()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._finished.is_set():
                self._say(f"leaving the swarm: {self._reason}")
                with contextlib.suppress(PeerError, TimeoutError):
                    async with asyncio.timeout(1):
                        await control.send(ProviderMessage(leaving=Leaving(reason=self._reason)))
                        await control.close()
                return 0
            failures = [error for task in done if (error := task.exception()) is not None]
            if failures and not self._embedded:
                raise failures[0]
            return 1 if failures else 0
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _obey(
        self,
        server: ProviderServer,
        client: CoordinatorClient,
        control: Control[ProviderMessage, CoordinatorMessage],
        feed: Link,
    ) -> None:
        """Does what the coordinator says, until it says stop or its stream ends."""
        while (message := await control.receive()) is not None:
            kind = message.WhichOneof("body")
            if kind == "deploy":
                try:
                    await self._deploy(message.deploy, server, client, feed)
                    await control.send(ProviderMessage(ready=Ready(deployment=message.deploy.deployment)))
                except Exception as error:
                    # Out of memory, say: whatever it is, the coordinator is to know why there is no stage.
                    text = str(error) if isinstance(error, RavnestError) else f"{type(error).__name__}: {error}"
                    failed = Failed(deployment=message.deploy.deployment, kind="deploy", message=text, microbatch=-1)
                    await control.send(ProviderMessage(failed=failed))
            elif kind == "start" and self._deployment is not None:
                try:
                    await self._deployment.link_next(self._node)
                except PeerError as error:
                    failed = Failed(deployment=message.start.deployment, kind="link", message=str(error), microbatch=-1)
                    await control.send(ProviderMessage(failed=failed))
            elif kind == "save" and self._deployment is not None:
                self._deployment.save(message.save.checkpoint)
            elif kind == "measure_peer" and self._peers is not None:
                self._peers.take(message.measure_peer)
            elif kind == "threads":
                torch.set_num_threads(max(1, message.threads.threads))
            elif kind == "stop":
                trained = 0 if self._deployment is None else self._deployment.samples
                self._say(f"ended: {message.stop.reason}; this machine trained on {trained:,} samples")
                return

    async def _deploy(self, order: Deploy, server: ProviderServer, client: CoordinatorClient, feed: Link) -> None:
        if self._deployment is not None:
            await self._deployment.close()
            self._deployment = None
        self._generation = order.generation
        self._say(f"taking stage {order.stage + 1} of {order.stages}")
        server.previous_node = order.previous_node
        deployment = await Deployment.make(order, client, self._device, self._baseline)
        async with self._deployed:
            self._deployment = deployment
            self._deployed.notify_all()
        deployment.open(feed)

    async def _take_feed(self, feed: Link) -> None:
        while (frame := await feed.receive()) is not None:
            if frame.generation < self._generation:
                # Of a run that was given up: it was under way when the new stage came.
                continue
            if self._deployment is None:
                raise PeerError("the coordinator fed a provider that holds no stage")
            self._deployment.take_feed(frame)

    async def _report(self, control: Control[ProviderMessage, CoordinatorMessage], heartbeat_seconds: float) -> None:
        reported: Deployment | None = None
        while True:
            deployment = await self._next_deployment(reported)
            news = asyncio.create_task(deployment.news.wait())
            waited: list[asyncio.Future[Any]] = [news, deployment.failure]
            await asyncio.wait(waited, timeout=heartbeat_seconds, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            report, saved = deployment.report()
            await control.send(ProviderMessage(report=report))
            for checkpoint in saved:
                await control.send(ProviderMessage(saved=Saved(deployment=deployment.name, checkpoint=checkpoint)))
            if deployment.failure.done():
                kind, text, microbatch = deployment.failure.result()
                failed = Failed(deployment=deployment.name, kind=kind, message=text, microbatch=microbatch)
                await control.send(ProviderMessage(failed=failed))
                reported = deployment
            await asyncio.sleep(_REPORT_SECONDS)

    async def _next_deployment(self, other_than: Deployment | None) -> Deployment:
        """The deployment at hand, once there is one that is not `other_than`."""
        async with self._deployed:
            await self._deployed.wait_for(lambda: self._deployment not in (None, other_than))
        assert self._deployment is not None
        return self._deployment

    async def _tell_progress(self) -> None:
        """Says now and then how fast it goes, while it does."""
        told: Deployment | None = None
        samples, since, pause = 0, time.monotonic(), _FIRST_TELL_SECONDS
        while True:
            deployment = await self._next_deployment(None)
            if deployment is not told:
                told, samples, since, pause = deployment, 0, time.monotonic(), _FIRST_TELL_SECONDS
            await asyncio.sleep(pause)
            if deployment is self._deployment and deployment.samples > samples:
                now = time.monotonic()
                rate = (deployment.samples - samples) / (now - since)
                self._say(f"training {rate:,.0f} samples/s, {deployment.samples:,} samples so far")
                samples, since, pause = deployment.samples, now, _TELL_SECONDS

    def _watch_for_the_end(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._finish, f"signal {signal.Signals(number).name}")
        if self._embedded:
            # The parent holds the other end of this pipe: when it dies, however it dies, the pipe ends.
            loop.add_reader(sys.stdin.fileno(), self._read_parent)

    def _read_parent(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            # Nobody is left to finish anything for, or to tell.
            os._exit(0)

    def _finish(self, reason: str) -> None:
        self._reason = reason
        self._finished.set()

    def _say(self, text: str) -> None:
        if not self._embedded:
            print(text, file=sys.stderr, flush=True)

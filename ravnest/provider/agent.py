"""The provider: joins a coordinator, takes a stage, works until told to stop.

One asyncio loop speaks with the network; one thread per deployment owns torch. What happens on failure:
- the coordinator cannot be reached or refuses: PeerError, exit code 2;
- the connection to the coordinator breaks: it is made again, and nothing is lost;
- the coordinator has given this node up: the provider gives its stage up and joins again;
- the coordinator is another than before, that was killed and started again: the provider joins again with the stage
  that it has, and goes on with it, takes another or none, as it is told;
- the coordinator stays away: the provider works on what it was fed, waits, and ends after some minutes;
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
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import torch

from ravnest import __version__, units
from ravnest.background import BackgroundTasks, cancel_and_wait
from ravnest.cores import usable_cores
from ravnest.engine.out_of_memory import is_out_of_memory, told
from ravnest.engine.speed.device_speed import Speed
from ravnest.engine.speed.pace import NO_PRETENCE, Pretence
from ravnest.errors import PeerError, RavnestError, RefusedError, printable
from ravnest.graph.portable import FORMAT_VERSION
from ravnest.net.address import is_wildcard, join_address, own_address_towards
from ravnest.net.direct_line import DirectLine, DirectServer
from ravnest.net.identity.certificates import Certificate
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.identity.swarm_invite import SwarmInvite
from ravnest.net.probe.measuring import LinkSpeed
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.rpc.first_contact import pin_authority
from ravnest.net.rpc.server import ProviderServer
from ravnest.net.streams.control_channel import ControlLink
from ravnest.net.streams.frame_stream import Link
from ravnest.net.streams.resumable_link import FIRST_BACKOFF_SECONDS, ResumableLink, longer_pause
from ravnest.net.v1.control_pb2 import (
    CoordinatorMessage,
    Deploy,
    Failed,
    JoinRequest,
    Leave,
    Neighbour,
    ProviderMessage,
    Saved,
)
from ravnest.net.v1.control_pb2 import Speed as SpeedMessage
from ravnest.net.version import PROTOCOL_VERSION
from ravnest.provider.fetch.artifacts import Artifacts
from ravnest.provider.fetch.cache import ArtifactCache
from ravnest.provider.fetch.progress import FetchLine, fetching
from ravnest.provider.machine.core_claims import CoreClaim
from ravnest.provider.machine.device import choose_device
from ravnest.provider.machine.memory import available_bytes, lent_bytes, resident_bytes
from ravnest.provider.machine.speed_cache import Setup, device_name, machine_speed, read_kept
from ravnest.provider.machine.torch_footprint import give_memory_back, leave_out_the_compiler
from ravnest.provider.machine.warm_up import warm_up
from ravnest.provider.membership.joining import join, kept_identity
from ravnest.provider.membership.link_measurements import PeerMeasuring, report_link
from ravnest.provider.membership.session import Stay
from ravnest.provider.replicas.files import PartFiles
from ravnest.provider.replicas.format import joined
from ravnest.provider.replicas.outgoing import StateTransfers
from ravnest.provider.replicas.service import ORDERS, Parts
from ravnest.provider.stage.hosted_stage import Deployment

_FIRST_TELL_SECONDS = 2.0
_TELL_SECONDS = 10.0
_PARENT_SECONDS = 2.0
_SHARE_SECONDS = 2.0
"""Time between two looks for other providers on this machine."""
_HAND_OVER_SECONDS = 90.0
"""Timeout of a provider that wants to leave and whose stage is not taken; longer while it is sending that. The
coordinator lets it go before."""
_LOOK_SECONDS = 5.0
_PATIENCE_SECONDS = 600.0
_LEFT_OVER_SECONDS = 120.0
"""How long a stage of a coordinator that is gone is kept for the next one to say what becomes of it."""
_ROUND_ORDERS = frozenset({"average", "ring_begin", "ring_catch_up", "ring_commit", "ring_abort"})
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
    outbound_only: bool = False,
    cache_bytes: int | None = None,
    pretence: Pretence = NO_PRETENCE,
    claim: CoreClaim | None = None,
    embedded: bool = False,
) -> int:
    """Provides until the run ends; the exit code. A RavnestError says why it could not.

    `cache_bytes` is how much of stages may be kept on the disk; 0: nothing, None: a bound that leaves room for others.
    It computes as a machine of its `pretence` would, with the cores that its `claim` says; None: with all.
    """
    leave_out_the_compiler()
    give_memory_back()
    try:
        chosen = choose_device(device)
        if invite == "-":
            # The parent of an embedded provider writes it once its server listens: the slow imports are done by then.
            invite = sys.stdin.readline().strip()
            if embedded and not invite:
                return 1
        # Several embedded providers and their coordinator share a machine, which has it all in memory already.
        cache = None if embedded else ArtifactCache.of_user(cache_bytes)
        name = name or platform.node()
        if claim is not None and chosen.type != "cpu":
            # What computes is not the processor.
            claim.close()
            claim = None
        parsed = SwarmInvite.parse(invite)
        agent = _Agent(parsed, chosen, memory_bytes, name, cache, cache_bytes, pretence, claim, embedded)
        listen = listen or ("127.0.0.1" if embedded else "0.0.0.0", 0)
        return asyncio.run(agent.main(None if outbound_only else listen, advertise))
    except RavnestError as error:
        if not embedded:
            raise
        # The parent reads this, and tells the user once what all its providers may say.
        if not _parent_has_ended():
            print(error, flush=True)
        return error.exit_code
    finally:
        if claim is not None:
            claim.close()


def _parent_has_ended() -> bool:
    """Whether the parent is gone, or going: it stops listening a moment before it closes the pipe."""
    readable, _, _ = select.select([sys.stdin], [], [], _PARENT_SECONDS)
    return bool(readable) and not os.read(sys.stdin.fileno(), 4096)


class _NoPartError(PeerError):
    """The part of a replica that a stage is to begin with cannot be had; somebody else may have it."""


class _LetGoError(Exception):
    """The coordinator has let go of this node, or cannot be reached any more; `why` is what is known of it."""

    def __init__(self, why: PeerError) -> None:
        super().__init__(str(why))
        self.why = why


class _Agent:
    def __init__(
        self,
        invite: SwarmInvite,
        device: torch.device,
        memory_bytes: int | None,
        name: str,
        cache: ArtifactCache | None,
        cache_bytes: int | None,
        pretence: Pretence,
        claim: CoreClaim | None,
        embedded: bool,
    ) -> None:
        self._invite = invite
        self._device = device
        self._memory_bytes = lent_bytes(available_bytes(device), memory_bytes)
        self._name = name
        self._node = NodeIdentity.new()
        self._cache = cache
        self._cache_bytes = cache_bytes
        self._pretence = pretence
        self._claim = claim
        self._cores = min(usable_cores(), torch.get_num_threads())
        """Cores that the providers of this machine share: torch counts those that are worth a thread."""
        self._embedded = embedded
        self._fetch_line = None if embedded else FetchLine(sys.stderr)
        self._baseline = 0
        self._direct_port = 0
        self._deployment: Deployment | None = None
        self._left_over = False
        """Whether that is of another coordinator than the one of this stay."""
        self._coordinator = ""
        """Which process that is."""
        self._stays = False
        """Whether there is a coordinator now."""
        self._parts: Parts | None = None
        self._sending = StateTransfers()
        self._generation = 0
        self._deployed = asyncio.Condition()
        self._speed: Speed | None = None
        self._link: LinkSpeed | None = None
        self._errands = BackgroundTasks()
        self._finished = asyncio.Event()
        self._wants_to_leave = asyncio.Event()
        self._reason = ""

    async def main(self, listen: tuple[str, int] | None, advertise: tuple[str, int] | None) -> int:
        """Provides until it is told to stop; with `listen` None, dials out only."""
        self._watch_for_the_end()
        authority = await pin_authority(self._invite)
        async with contextlib.AsyncExitStack() as stack:
            if not self._embedded:
                self._node = stack.enter_context(kept_identity(self._invite, authority, self._name))
            self._files = PartFiles.of_node(self._node, self._cache_bytes, self._say)
            self._server = ProviderServer(self, self._node, lambda report: self._say(str(report)))
            stack.push_async_callback(self._server.stop)
            address = ""
            if listen is not None:
                address = self._address(listen[0], await self._server.start(*listen), advertise)
                direct = DirectServer(self._node, lambda node_id: node_id in self._server.neighbours, self._take_direct)
                # Beside the port that was asked for: who forwards one port of a router to here can forward two.
                self._direct_port = direct.start(listen[0], listen[1] + 1 if 0 < listen[1] < 65535 else 0)
                stack.callback(direct.stop)
            stack.push_async_callback(self._give_up_stage)
            return await self._keep_staying(authority, address)

    async def _keep_staying(self, authority: Certificate, address: str) -> int:
        """Joins, and joins again whenever the coordinator has let go of this node without telling it to stop."""
        why: PeerError | None = None
        since, pause = time.monotonic(), FIRST_BACKOFF_SECONDS
        while True:
            try:
                return await self._stay(authority, address)
            except _LetGoError as ended:
                why, since, pause = ended.why, time.monotonic(), FIRST_BACKOFF_SECONDS
            except PeerError as error:
                # One that never got in is told why not; a coordinator that was there may be back soon.
                if why is None or time.monotonic() - since > _PATIENCE_SECONDS:
                    raise
                if isinstance(error, RefusedError):
                    raise (why if isinstance(why, RefusedError) else error) from None
                if pause == FIRST_BACKOFF_SECONDS:
                    self._say(f"{error}; trying to join again for {_PATIENCE_SECONDS / 60:.0f} minutes")
            finally:
                self._left_over, self._stays = self._deployment is not None, False
                if self._deployment is not None:
                    self._deployment.left_alone()
            if await self._asked_to_leave_within(pause):
                return 0
            pause = longer_pause(pause, time.monotonic() - since)

    async def _asked_to_leave_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._finished.wait()
            self._say(f"leaving the swarm: {self._reason}")
            return True
        return False

    async def _stay(self, authority: Certificate, address: str) -> int:
        """One stay in the swarm; the exit code, or _LetGoError when the coordinator has let go of this node."""
        about_us = JoinRequest(
            name=self._name,
            address=address,
            device=str(self._device),
            memory_bytes=self._memory_bytes,
            # Several share this machine where it is embedded: its coordinator knows how many.
            threads=0 if self._embedded else torch.get_num_threads(),
            version=__version__,
            protocol=PROTOCOL_VERSION,
            graph_format=FORMAT_VERSION,
            slower=self._pretence.slower,
            stage_seconds=self._pretence.stage_seconds,
            direct_port=self._direct_port,
            parts=self._files.held(),
            held=None if self._deployment is None else self._deployment.held,
        )
        # Where all are processors of one machine they are alike, and there is nothing to tell.
        if not self._embedded or self._device.type != "cpu":
            await self._describe(about_us)
        client, reply = await join(self._invite, authority, self._node, about_us)
        self._stays = True
        if reply.process == self._coordinator:
            # It has been given up, and others do its work.
            await self._give_up_stage()
        self._coordinator = reply.process
        where = f"at {address}" if address else "without a port of its own"
        self._say(f"joined {client.address} as {reply.node_id}, lending {self._device} {where}")
        self._baseline = self._baseline or resident_bytes()
        stay = Stay(client, reply.session)
        artifacts = Artifacts(client, self._cache, self._say)
        parts = Parts(
            self._files, self._node, client, artifacts, stay.control.send, self._allow, self._say, self._sending
        )
        self._parts = parts
        try:
            return await self._work(stay, reply.heartbeat_seconds)
        finally:
            self._parts = None
            await parts.close()
            await stay.close()

    async def _describe(self, about_us: JoinRequest) -> None:
        """Measures this machine, once."""
        if self._speed is None and self._claim is not None:
            _, said = self._take_share(self._claim)
            if self._claim.is_told:
                self._say(said)
            about_us.threads = about_us.threads and torch.get_num_threads()
        known, self._speed = self._speed, self._speed or await machine_speed(self._device, self._memory_bytes)
        self._tell_speed(about_us)
        speed = self._speed.divided(self._pretence.slower)
        about_us.device_name = device_name(self._device)
        about_us.measures_link = not self._embedded
        if known is None:
            memory, rate = units.byte_size(self._memory_bytes), units.flops(speed.flops_per_second)
            self._say(f"this machine: {self._device}, {units.counted(about_us.cores, 'core')}, {memory}, {rate}")
            if said := self._pretence.in_words:
                self._say(said)

    def _tell_speed(self, message: JoinRequest | SpeedMessage) -> None:
        """Writes into a message how fast this machine is with the cores that it takes."""
        assert self._speed is not None
        speed = self._speed.divided(self._pretence.slower)
        message.flops_per_second = speed.flops_per_second
        message.memory_bytes_per_second = speed.memory_bytes_per_second
        message.bfloat16_flops_per_second = speed.bfloat16_flops_per_second
        message.float16_flops_per_second = speed.float16_flops_per_second
        shares = self._claim is not None and self._claim.is_told and torch.get_num_threads() < self._cores
        message.cores = torch.get_num_threads() if shares else usable_cores()

    def _take_share(self, claim: CoreClaim) -> tuple[bool, str]:
        """Computes with this provider's share of the cores from now on; whether that is another than before, and why
        it is as large as it is."""
        threads, reason = claim.share(usable_cores() if claim.claim.cores else self._cores)
        changed = threads != torch.get_num_threads()
        if changed:
            torch.set_num_threads(threads)
            if self._deployment is not None:
                self._deployment.set_threads(threads)
        return changed, reason

    async def _share_cores(self, stay: Stay, claim: CoreClaim) -> None:
        """Looks for other providers on this machine, for ever, and tells the coordinator what its share makes of it."""
        while True:
            await asyncio.sleep(_SHARE_SECONDS)
            before = torch.get_num_threads()
            changed, said = self._take_share(claim)
            if changed and self._speed is not None:
                self._say(said)
                self._speed = await self._speed_on_share(self._speed, before)
                message = SpeedMessage(threads=torch.get_num_threads())
                self._tell_speed(message)
                await stay.control.send(ProviderMessage(speed=message))

    async def _speed_on_share(self, known: Speed, threads_before: int) -> Speed:
        """The speed with the present number of threads: kept, measured while nothing is computed here, or estimated."""
        kept = read_kept(Setup.here(self._device))
        if kept is None and self._deployment is None:
            kept = await machine_speed(self._device, self._memory_bytes)
        return kept or known.divided(threads_before / torch.get_num_threads())

    async def _report_link(self, stay: Stay) -> None:
        """Measures the connection to the coordinator, once: one that comes back says what it found then."""
        known, self._link = self._link, await report_link(stay.client, stay.control, self._link)
        if (link := self._link) is not None and known is None:
            down, up = units.megabits(link.down_bytes_per_second), units.megabits(link.up_bytes_per_second)
            trip = units.milliseconds(link.round_trip_seconds)
            self._say(f"connection to the coordinator: {trip}, {down} Mbit/s down, {up} Mbit/s up")

    def _address(self, listen_host: str, port: int, given: tuple[str, int] | None) -> str:
        """Where neighbouring stages reach this node."""
        if given is not None:
            return join_address(given[0], given[1] or port)
        if is_wildcard(listen_host):
            return join_address(own_address_towards(self._invite.host, self._invite.port), port)
        return join_address(listen_host, port)

    async def _give_up_stage(self) -> None:
        deployment, self._deployment, self._left_over = self._deployment, None, False
        self._server.neighbours = ()
        if deployment is not None:
            await deployment.close()
            if late := deployment.overruns:
                self._say(f"{late} forwards and backwards took longer than this machine pretends")

    async def _give_up_left_over(self, keys: Sequence[str] = ()) -> None:
        """The run has the stages of these keys; where they are of another deployment, nobody wants that of before."""
        deployment = self._deployment
        if self._left_over and deployment is not None and not any(k.startswith(f"{deployment.name}-") for k in keys):
            await self._give_up_stage()

    async def _wait_with_left_over(self) -> None:
        await asyncio.sleep(_LEFT_OVER_SECONDS)
        await self._give_up_left_over()

    async def link(self, peer: str, connection: Link) -> None:
        """A neighbouring stage dials in; it may do so before the own stage is built. So does who exchanges parts."""
        if self._parts is not None and await self._parts.accept(peer, connection):
            return
        if peer not in self._server.neighbours:
            raise RefusedError(f"there is no link {connection.label[:80]!r} with {peer} here")
        await (await self._next_deployment(None)).accept(peer, connection)

    def _allow(self, keepers: frozenset[str]) -> None:
        self._server.keepers = keepers

    def _take_direct(self, line: DirectLine) -> None:
        """Another owner of a ring sends over a direct line. On a thread of the line's own."""
        deployment = self._deployment
        if deployment is not None:
            deployment.take_direct(line)

    async def _work(self, stay: Stay, heartbeat_seconds: float) -> int:
        peers = PeerMeasuring(self._node, stay.control)
        # Also while it holds no stage: whoever is ready to take one is to be known to be there.
        stay.control.link.beat_seconds = heartbeat_seconds
        connecting = asyncio.create_task(stay.keep_connected())
        duties: list[Coroutine[Any, Any, object]] = [
            self._obey(stay, peers),
            self._take_feed(stay.feed),
            self._report(stay.control, heartbeat_seconds),
            self._finished.wait(),
            self._hand_over(stay),
        ]
        if self._left_over:
            self._errands.spawn(self._wait_with_left_over())
        if not self._embedded:
            duties += [self._tell_progress(), stay.tell_connection(self._say)]
            if self._claim is not None and self._claim.claim.cores is None:
                duties.append(self._share_cores(stay, self._claim))
            self._errands.spawn(self._report_link(stay))
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(duty) for duty in duties]
        try:
            done, _ = await asyncio.wait([connecting, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            self._errands.cancel()
            if self._finished.is_set():
                self._say(f"leaving the swarm: {self._reason}")
                await stay.leave(self._reason)
                return 0
            failures = [error for task in done if (error := task.exception()) is not None]
            if not failures:
                await stay.leave("the coordinator said stop")
                return 0
            # An embedded one goes with its parent, and stays while that is there: it is refused where it was given up.
            if isinstance(failures[0], RefusedError if self._embedded else PeerError):
                raise _LetGoError(failures[0])
            raise failures[0]
        finally:
            self._errands.cancel()
            await cancel_and_wait(connecting, *tasks)
            await self._errands.close()
            await peers.close()

    async def _obey(self, stay: Stay, peers: PeerMeasuring) -> None:
        """Does what the coordinator says, until it says stop or ends the link."""
        ordered = 0
        """The newest generation of a stage that it was to take, in this stay: another coordinator counts anew."""
        while (message := await stay.control.receive()) is not None:
            kind = message.WhichOneof("body")
            if kind == "deploy":
                if message.deploy.generation < ordered:
                    # Of a formation that was given up while this was on its way.
                    continue
                ordered = message.deploy.generation
                if self._parts is not None:
                    self._parts.expect(message.deploy)
                # On the side: whatever else is said is heard meanwhile, stop above all.
                await self._errands.close()
                if message.deploy.keep:
                    # At once, and not with the rest: what is said next may be of other owners again.
                    self._meet_owners(message.deploy.deployment, message.deploy.ring_peers, stay.client)
                self._errands.spawn(self._deploy(message.deploy, stay))
            elif kind == "start" and self._deployment is not None:
                self._deployment.link()
            elif kind == "ring_peers":
                self._meet_owners(message.ring_peers.deployment, message.ring_peers.peers, stay.client)
            elif kind in ORDERS and self._parts is not None:
                if kind == "hold":
                    self._errands.spawn(asyncio.to_thread(warm_up))
                if kind == "forget" and not message.forget.of:
                    self._errands.spawn(self._give_up_left_over(message.forget.keep))
                self._parts.obey(message)
            elif kind == "meet":
                self._meet(message.meet.link)
            elif kind == "save" and self._deployment is not None:
                self._deployment.save(message.save.checkpoint, message.save.anchored)
            elif kind == "trace" and self._deployment is not None:
                if message.trace.deployment == self._deployment.name:
                    self._deployment.trace(message.trace.microbatch)
            elif kind == "flight" and self._deployment is not None:
                if message.flight.deployment == self._deployment.name:
                    self._deployment.set_limit(message.flight.in_flight)
            elif kind in _ROUND_ORDERS and self._deployment is not None:
                self._deployment.average(message)
            elif kind == "measure_peer":
                peers.take(message.measure_peer)
            elif kind == "threads":
                torch.set_num_threads(max(1, message.threads.threads))
            elif kind == "stop":
                trained = 0 if self._deployment is None else self._deployment.samples
                self._say(f"ended: {message.stop.reason}; this machine trained on {trained:,} samples")
                return

    def _meet(self, link: str) -> None:
        of_parts = self._parts is not None and self._parts.meet(link)
        if not of_parts and self._deployment is not None:
            self._deployment.meet(link)

    def _meet_owners(self, deployment: str, peers: Iterable[Neighbour], client: CoordinatorClient) -> None:
        if self._deployment is not None and self._deployment.name == deployment:
            self._deployment.meet_owners(peers, client)
            self._server.neighbours = self._deployment.neighbours

    async def _deploy(self, order: Deploy, stay: Stay) -> None:
        """Takes the stage, and says when it is ready or why it cannot be."""
        try:
            # First: what still comes for the stage before is passed over from now on.
            self._generation = order.generation
            warming = asyncio.create_task(asyncio.to_thread(warm_up))
            deployment = await (self._keep_stage(order, stay) if order.keep else self._take_stage(order, stay))
            if self._parts is not None and order.key:
                deployment.on_keep = self._parts.keeper(order)
            self._server.neighbours = deployment.neighbours
            ready = deployment.ready()
            async with self._deployed:
                self._deployment, self._left_over = deployment, False
                self._deployed.notify_all()
            await warming
            deployment.open(stay.feed, stay.control.send)
            await stay.control.send(ProviderMessage(ready=ready))
        except Exception as error:
            # Out of memory, say: whatever it is, the coordinator is to know why there is no stage.
            text = str(error) if isinstance(error, RavnestError) else f"{type(error).__name__}: {error}"
            kind = "no_part" if isinstance(error, _NoPartError) else "deploy"
            if is_out_of_memory(error):
                kind, text = "memory", f"{told(error)} for the stage ({text})"
            failed = Failed(
                deployment=order.deployment, kind=kind, message=text, microbatch=-1, generation=order.generation
            )
            await stay.control.send(ProviderMessage(failed=failed))

    async def _take_stage(self, order: Deploy, stay: Stay) -> Deployment:
        """Builds the stage of this order, from what the coordinator has or from a part of a replica."""
        await self._give_up_stage()
        self._say(f"taking stage {order.stage + 1} of {order.stages}")
        self._server.neighbours = {n.node for n in (order.previous, order.next, *order.ring_peers) if n.node}
        part = None
        if order.part_key or order.donors:
            assert self._parts is not None
            try:
                part = await self._parts.part(order) if order.part_key else joined(await self._parts.donated(order))
            except PeerError as error:
                raise _NoPartError(str(error)) from None
        artifacts = Artifacts(stay.client, self._cache, self._say)
        async with fetching(order, stay.control, self._fetch_line) as progress:
            return await Deployment.make(
                *(order, stay.client, self._node, self._device, self._baseline, artifacts, progress, self._pretence),
                part=part,
                sending=self._sending,
                memory_bytes=self._memory_bytes,
            )

    async def _keep_stage(self, order: Deploy, stay: Stay) -> Deployment:
        """Goes on with the stage that is here, between other neighbours."""
        if self._deployment is None:
            raise PeerError(f"stage {order.stage} is to be kept, and this provider holds none")
        return await self._deployment.renewed(order, stay.client, self._node)

    async def _take_feed(self, feed: ResumableLink) -> None:
        while (frame := await feed.receive()) is not None:
            if frame.generation < self._generation:
                # Of a run that was given up: it was under way when the new stage came.
                continue
            if self._deployment is None:
                raise RefusedError("the coordinator fed a provider that holds no stage")
            self._deployment.take_feed(frame)

    async def _report(
        self, control: ControlLink[ProviderMessage, CoordinatorMessage], heartbeat_seconds: float
    ) -> None:
        reported: Deployment | None = None
        while True:
            deployment = await self._next_deployment(reported)
            news = asyncio.create_task(deployment.news.wait())
            waited: list[asyncio.Future[Any]] = [news, deployment.failure]
            await asyncio.wait(waited, timeout=heartbeat_seconds, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()
            strained = deployment.look_at_memory(self._memory_bytes)
            if strained is not None:
                self._say(strained.reason)
                await control.send(ProviderMessage(strained=strained))
            report, saved = deployment.report()
            await control.send(ProviderMessage(report=report))
            for checkpoint in saved:
                await control.send(ProviderMessage(saved=Saved(deployment=deployment.name, checkpoint=checkpoint)))
            if deployment.failure.done() and deployment is self._deployment:
                kind, text, microbatch = deployment.failure.result()
                failed = Failed(
                    deployment=deployment.name,
                    kind=kind,
                    message=text,
                    microbatch=microbatch,
                    generation=deployment.generation,
                    about=deployment.accused,
                )
                await control.send(ProviderMessage(failed=failed))
                # It stays: a stage whose neighbour is gone may be kept.
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
                told, samples = deployment, deployment.samples
                since, pause = time.monotonic(), _FIRST_TELL_SECONDS
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
        """Asked once, it hands its stage over first; asked again, it goes."""
        self._reason = reason
        if self._embedded or self._deployment is None or not self._stays or self._wants_to_leave.is_set():
            self._finished.set()
        self._wants_to_leave.set()

    async def _hand_over(self, stay: Stay) -> None:
        """Once it is asked to go: lets somebody else take its stage, and goes when that is done or takes too long."""
        await self._wants_to_leave.wait()
        self._say("handing the stage over to somebody else; press Ctrl-C again to leave at once")
        await stay.control.send(ProviderMessage(leave=Leave(reason=self._reason)))
        await asyncio.sleep(_HAND_OVER_SECONDS)
        while self._sending.moved_within(_HAND_OVER_SECONDS):
            await asyncio.sleep(_LOOK_SECONDS)
        self._finished.set()
        await asyncio.Event().wait()

    def _say(self, text: str) -> None:
        if self._fetch_line is not None:
            self._fetch_line.interrupt()
            # Reasons and names in it may be the coordinator's words.
            print(printable(text), file=sys.stderr, flush=True)

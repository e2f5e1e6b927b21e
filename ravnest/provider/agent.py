"""Provider agent: joins a swarm, serves one session with the coordinator after the other, and leaves.

One asyncio loop does the networking; one thread for each hosted stage owns torch. On failure:

- the coordinator cannot be reached or refuses the provider: PeerError, exit code 2;
- the connection to the coordinator breaks: the provider reconnects, and nothing is lost;
- the coordinator has dropped this provider: the provider gives up its stage and joins again;
- the coordinator was restarted: the provider joins again with its stage, which the coordinator resumes or replaces;
- the coordinator stays away: the stage works on what it was fed, and the provider ends after some minutes;
- the stage fails: the coordinator hears the kind, the reason and the microbatch, and decides.
"""

import asyncio
import contextlib
import math
import os
import platform
import select
import sys
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ravnest import __version__
from ravnest.background import BackgroundTasks
from ravnest.engine.speed.pretended_pace import NO_PRETENCE, Pretence
from ravnest.errors import PeerError, RavnestError, RefusedError
from ravnest.graph.portable import FORMAT_VERSION
from ravnest.net.identity.certificates import Certificate
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.identity.swarm_invite import SwarmInvite
from ravnest.net.pacing.budget import StateBudget
from ravnest.net.pacing.traffic_limit import NO_LIMITS, TRAFFIC, UserLimits
from ravnest.net.rpc.first_contact import pin_authority
from ravnest.net.v1.control_pb2 import JoinRequest, ProviderMessage
from ravnest.net.version import PROTOCOL_VERSION
from ravnest.provider.commands import Commands
from ravnest.provider.console import Console
from ravnest.provider.fetch.artifacts import Artifacts
from ravnest.provider.fetch.cache import ArtifactCache
from ravnest.provider.fetch.local_weights import LocalWeights, huggingface_folder, searched_text
from ravnest.provider.machine.core_claims import CoreClaim
from ravnest.provider.machine.device import choose_device
from ravnest.provider.machine.memory import available_bytes, lent_bytes, resident_bytes
from ravnest.provider.machine.profile import MachineProfile, OfferedMachine
from ravnest.provider.machine.torch_footprint import give_memory_back, leave_out_the_compiler
from ravnest.provider.membership.departure import Departure, end_with_parent
from ravnest.provider.membership.joining import data_folder, has_joined_before, join, kept_identity
from ravnest.provider.membership.link_measurements import CoordinatorLink, PeerMeasuring, is_on_own_network
from ravnest.provider.membership.monthly_cap import MonthlyCap, MonthlyCount
from ravnest.provider.membership.rejoin import SessionOverError, reach_again, serve_sessions
from ravnest.provider.membership.session import SwarmSession
from ravnest.provider.presence import NetworkPresence, appear
from ravnest.provider.replicas.files import PartFiles
from ravnest.provider.replicas.outgoing import OutgoingTransfers
from ravnest.provider.replicas.service import ReplicaService
from ravnest.provider.stage.deployer import StageDeployer
from ravnest.provider.stage.host import Host
from ravnest.provider.stage.reporter import print_progress, report_stage
from ravnest.provider.stage.slot import StageSlot

_PARENT_SECONDS: Final = 2.0
_SHARE_SECONDS: Final = 2.0
"""Time between two looks for other providers on this machine."""


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
    weights: Sequence[Path] | None = None,
    pretence: Pretence = NO_PRETENCE,
    claim: CoreClaim | None = None,
    embedded: bool = False,
    limits: UserLimits = NO_LIMITS,
) -> int:
    """Provide until the run ends; returns the exit code. A RavnestError says why that is not possible.

    `cache_bytes` limits the disk space for downloaded stages; 0 disables the cache, None leaves room for other
    programs. `weights` are folders with weights that need not be downloaded; None for the user's Hugging Face cache.
    All traffic stays within the `limits`. The provider computes as slowly as its `pretence` says, with the cores of its
    `claim`; None: with all.
    """
    leave_out_the_compiler()
    give_memory_back()
    try:
        chosen = choose_device(device)
        if invite == "-":
            # The parent of an embedded provider writes the invite once its server listens, while the imports run here.
            invite = sys.stdin.readline().strip()
            if embedded and not invite:
                return 1
        if claim is not None and chosen.type != "cpu":
            # A provider that computes on a GPU does not share the cores.
            claim.close()
            claim = None
        options = ProviderOptions(
            invite=SwarmInvite.parse(invite),
            name=name or platform.node(),
            # Embedded providers share a machine with their coordinator, which has every stage in memory already.
            cache=None if embedded else ArtifactCache.of_user(cache_bytes),
            cache_bytes=cache_bytes,
            weights=() if embedded else _folders(weights),
            listen=None if outbound_only else listen or ("127.0.0.1" if embedded else "0.0.0.0", 0),
            advertise=advertise,
            limits=limits,
        )
        memory = lent_bytes(available_bytes(chosen), memory_bytes)
        return asyncio.run(_provide(options, OfferedMachine(chosen, memory, pretence, claim, embedded)))
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


@dataclass(frozen=True)
class ProviderOptions:
    """Options of the user for a provider, apart from the machine that it runs on."""

    invite: SwarmInvite
    name: str
    cache: ArtifactCache | None
    cache_bytes: int | None
    weights: tuple[Path, ...]
    """Folders with weights that need not be downloaded."""
    listen: tuple[str, int] | None
    """Host and port to listen at; None: outgoing connections only."""
    advertise: tuple[str, int] | None
    limits: UserLimits = NO_LIMITS


async def _provide(options: ProviderOptions, machine: OfferedMachine) -> int:
    console = Console(None if machine.is_embedded else sys.stderr)
    slot = StageSlot(console.say)
    departure = Departure(lambda: slot.has_session and slot.hosted is not None and not machine.is_embedded, console.say)
    departure.on_signals()
    if machine.is_embedded:
        end_with_parent()
    was_member = not machine.is_embedded and has_joined_before(options.invite)
    authority = await reach_again(lambda: pin_authority(options.invite), was_member, departure, console.say)
    if authority is None:
        return 0
    async with contextlib.AsyncExitStack() as stack:
        if machine.is_embedded:
            node = NodeIdentity.new()
        else:
            node = stack.enter_context(kept_identity(options.invite, authority, options.name))
        presence = await appear(node, options.invite, options.listen, options.advertise, slot, console, stack)
        stack.push_async_callback(slot.give_up)
        return await Agent(options, machine, authority, presence, slot, departure, console).serve()


class Agent:
    """Serves one session after the other until the provider leaves."""

    def __init__(
        self,
        options: ProviderOptions,
        machine: OfferedMachine,
        authority: Certificate,
        presence: NetworkPresence,
        slot: StageSlot,
        departure: Departure,
        console: Console,
    ) -> None:
        self._options = options
        self._machine = machine
        self._authority = authority
        self._presence = presence
        self._slot = slot
        self._departure = departure
        self._console = console
        self._files = PartFiles.of_node(presence.node, options.cache_bytes, console.say)
        self._profile = MachineProfile(machine, console.say)
        # The providers of an embedded swarm share no line: they are all on this machine.
        self._budget = StateBudget.unlimited() if machine.is_embedded else StateBudget()
        TRAFFIC.limit(options.limits)
        self._budget.limit(options.limits.upload_bytes_per_second)
        self._cap: MonthlyCap | None = None
        if options.limits.monthly_bytes < math.inf:
            count = MonthlyCount(data_folder() / "ravnest", say=console.say)
            self._cap = MonthlyCap(options.limits.monthly_bytes, count, TRAFFIC, self._budget)
        self._coordinator_link = CoordinatorLink(console.say, self._budget, options.limits)
        self._transfers = OutgoingTransfers(self._budget)
        self._local = LocalWeights(options.weights) if options.weights else None
        self._coordinator = ""
        """The process of the coordinator in the last session; a restarted coordinator is another one."""
        self._baseline_bytes = 0

    async def serve(self) -> int:
        """Join, and join again whenever a session ends without an order to stop. Returns the exit code."""
        if self._options.weights:
            self._console.say(searched_text(self._options.weights))
        if self._cap is None:
            return await self._serve_all()
        await asyncio.to_thread(self._cap.check)
        try:
            return await self._serve_all()
        finally:
            await asyncio.to_thread(self._cap.update)

    async def _serve_all(self) -> int:
        return await serve_sessions(self._serve_session, self._slot.on_session_end, self._departure, self._console.say)

    async def _serve_session(self) -> int:
        """One session; the exit code, or SessionOverError."""
        request = self._join_request()
        # Embedded providers that compute on the processor are equal, and need not be described.
        if not self._machine.is_embedded or self._machine.device.type != "cpu":
            await self._profile.describe(request)
        node = self._presence.node
        client, reply = await join(self._options.invite, self._authority, node, request)
        self._slot.has_session = True
        if reply.process == self._coordinator:
            # The same coordinator has dropped this provider, and other providers do its work.
            await self._slot.give_up()
        self._coordinator = reply.process
        where = f"at {self._presence.address}" if self._presence.address else "without a port of its own"
        self._console.say(f"joined {client.address} as {reply.node_id}, lending {self._machine.device} {where}")
        self._baseline_bytes = self._baseline_bytes or resident_bytes()
        session = SwarmSession(client, reply.session)
        session.control.link.foreground = self._budget.control
        is_near = await is_on_own_network(client.address)
        session.feed.foreground = self._budget.nearby if is_near else self._budget
        artifacts = Artifacts(client, self._options.cache, self._console.say, self._local)
        parts = ReplicaService(
            self._files, node, client, artifacts, session.control.send, self._allow, self._console.say, self._transfers
        )
        self._presence.links.parts = parts
        try:
            return await self._work(session, reply.heartbeat_seconds, parts, artifacts)
        finally:
            self._presence.links.parts = None
            await parts.close()
            await session.close()

    def _join_request(self) -> JoinRequest:
        machine, hosted = self._machine, self._slot.hosted
        return JoinRequest(
            name=self._options.name,
            address=self._presence.address,
            device=str(machine.device),
            memory_bytes=machine.memory_bytes,
            # The coordinator of embedded providers divides the cores of this machine among them.
            threads=0 if machine.is_embedded else torch.get_num_threads(),
            version=__version__,
            protocol=PROTOCOL_VERSION,
            graph_format=FORMAT_VERSION,
            slower=machine.pretence.slower,
            stage_seconds=machine.pretence.stage_seconds,
            direct_port=self._presence.direct_port,
            parts=self._files.held(),
            held=None if hosted is None else hosted.held,
        )

    def _allow(self, holders: frozenset[str]) -> None:
        self._presence.server.keepers = holders

    async def _work(
        self, session: SwarmSession, heartbeat_seconds: float, parts: ReplicaService, artifacts: Artifacts
    ) -> int:
        """Do everything that a session consists of, until the first part of it ends."""
        say, slot, embedded = self._console.say, self._slot, self._machine.is_embedded
        measuring = PeerMeasuring(self._presence.node, session.control, self._budget, self._options.limits)
        # Heartbeats also while there is no stage: the coordinator has to know which standbys are present.
        session.control.link.beat_seconds = heartbeat_seconds
        deployer = StageDeployer(session, self._host(), slot, parts, artifacts, self._console)
        try:
            async with BackgroundTasks() as duties, BackgroundTasks() as background:
                commands = Commands(session, slot, deployer, parts, measuring, background, say)
                work: list[Coroutine[Any, Any, object]] = [
                    session.keep_connected(),
                    commands.obey(),
                    commands.take_feed(),
                    report_stage(slot, session.control, heartbeat_seconds, say),
                    self._departure.wait(),
                    self._departure.hand_over(session, self._transfers.moved_within, self._budget.lift),
                ]
                if self._cap is not None:
                    work.append(self._cap.watch(self._departure.ask, say))
                if slot.is_left_over:
                    background.spawn(slot.expire_left_over())
                if not embedded:
                    work += [print_progress(slot, say), session.print_interruptions(say)]
                    claim = self._machine.claim
                    if claim is not None and claim.claim.cores is None:
                        work.append(self._share_cores(session, claim))
                    background.spawn(self._coordinator_link.report(session.client, session.control))
                connecting, *others = [duties.spawn(each) for each in work]
                done, _ = await asyncio.wait([connecting, *others], return_when=asyncio.FIRST_COMPLETED)
                # The session stays connected, so that the provider can take its leave.
                background.cancel()
                for task in others:
                    task.cancel()
                return await self._end_session(session, done)
        finally:
            await measuring.close()

    async def _end_session(self, session: SwarmSession, done: Collection[asyncio.Task[object]]) -> int:
        """Conclude a session from the parts that have ended: the exit code, or SessionOverError."""
        if self._departure.leaves_now:
            self._console.say(f"leaving the swarm: {self._departure.reason}")
            await session.leave(self._departure.reason)
            return 0
        failures = [error for task in done if (error := task.exception()) is not None]
        if not failures:
            await session.leave("the coordinator said stop")
            return 0
        # An embedded provider ends with its coordinator, so only a refusal means that it was dropped.
        if isinstance(failures[0], RefusedError if self._machine.is_embedded else PeerError):
            raise SessionOverError(failures[0])
        raise failures[0]

    def _host(self) -> Host:
        machine = self._machine
        return Host(
            self._presence.node,
            machine.device,
            machine.memory_bytes,
            self._baseline_bytes,
            machine.pretence,
            self._console.say,
            self._transfers,
        )

    async def _share_cores(self, session: SwarmSession, claim: CoreClaim) -> None:
        """Adapt to other providers on this machine, and tell the coordinator. Runs forever."""
        while True:
            await asyncio.sleep(_SHARE_SECONDS)
            hosted = self._slot.hosted
            speed = await self._profile.next_share(claim, computes=hosted is not None)
            if speed is not None:
                if hosted is not None:
                    hosted.set_threads(speed.threads)
                await session.control.send(ProviderMessage(speed=speed))


def _folders(given: Sequence[Path] | None) -> tuple[Path, ...]:
    """The folders that are searched for weights."""
    if given is not None:
        return tuple(given)
    cache = huggingface_folder()
    return () if cache is None else (cache,)


def _parent_has_ended() -> bool:
    """Whether the parent is gone, or about to go: it stops listening a moment before it closes the pipe."""
    readable, _, _ = select.select([sys.stdin], [], [], _PARENT_SECONDS)
    return bool(readable) and not os.read(sys.stdin.fileno(), 4096)

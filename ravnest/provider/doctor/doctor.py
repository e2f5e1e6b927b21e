"""Examination of a machine before it is lent: what it has, how fast it is, and whether a coordinator would admit it.

Each step reports its result at once. Steps that depend on a failed one are left out: without torch the device is not
examined, and without a connection the coordinator is not asked. Nothing is changed: checking an invite does not use it
up.
"""

import asyncio
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ravnest import __version__
from ravnest.cores import usable_cores
from ravnest.errors import PeerError, RavnestError
from ravnest.net.address import bind_refusal, join_address
from ravnest.provider.doctor.checks import (
    CheckResult,
    Versions,
    from_error,
    judge_clock,
    judge_connection,
    judge_device,
    judge_disk,
    judge_invite,
    judge_link,
    judge_memory,
    judge_name,
    judge_port,
    judge_python,
    judge_reach,
    judge_speed,
    judge_torch,
    judge_versions,
)

# Modules that import torch or grpc are imported where they are used, because this must run where those are broken.
if TYPE_CHECKING:
    from ravnest.net.identity.certificates import Certificate
    from ravnest.net.identity.swarm_invite import SwarmInvite
    from ravnest.net.rpc.client import CoordinatorClient
    from ravnest.net.v1.control_pb2 import CheckRequest

CONNECT_SECONDS: Final = 5.0

Tell = Callable[[CheckResult], None]


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """How the machine would be lent, with the options of `ravnest join`."""

    invite: str | None = None
    device: str = "auto"
    memory_bytes: int | None = None
    listen: tuple[str, int] = ("0.0.0.0", 0)


def examine(wanted: DoctorOptions, tell: Tell) -> None:
    """Report every result; problems of the machine raise no error here."""
    tell(judge_python(sys.version_info[:2]))
    torch = look_at_torch()
    tell(torch)
    tell(look_at_port(*wanted.listen))
    if torch.level != "problem":
        asyncio.run(_examine(wanted, tell))


def look_at_torch() -> CheckResult:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return judge_torch(None)
    found = judge_torch(version)
    if found.level != "problem":
        try:
            import torch  # noqa: F401  (whether it loads is the question)
        except (ImportError, OSError) as error:
            return judge_torch(version, str(error).strip().splitlines()[0])
    return found


def look_at_port(host: str, port: int) -> CheckResult:
    address = join_address(host, port) if port else host
    return judge_port(address, port, bind_refusal(host, port))


async def reachable_from_outside(client: "CoordinatorClient", listen: tuple[str, int]) -> CheckResult | None:
    """Whether other machines can dial this one at its port; None if that cannot be tried."""
    from ravnest.net.probe.reverse_dial import listening_for_a_moment

    request = _check_request()
    try:
        async with listening_for_a_moment(*listen) as (request.port, request.nonce):
            reply = await client.check(request)
    except OSError:
        return None  # The check of the port reports it.
    except PeerError as error:
        return from_error("reach", error, "warning", "try again later")
    return judge_reach(reply.seen_host, request.port, reply.not_reached) if reply.dialled else None


async def _examine(wanted: DoctorOptions, tell: Tell) -> None:
    await _look_at_device(wanted, tell)
    tell(_look_at_disk())
    if wanted.invite is not None:
        await _look_at_coordinator(wanted.invite, wanted.listen, tell)


async def _look_at_device(wanted: DoctorOptions, tell: Tell) -> None:
    from ravnest.engine.speed.device_speed import HALVES
    from ravnest.provider.machine.device import choose_device
    from ravnest.provider.machine.memory import available_bytes, lent_bytes
    from ravnest.provider.machine.speed_cache import device_name, machine_speed
    from ravnest.provider.machine.torch_footprint import give_memory_back, leave_out_the_compiler

    # As in a provider, so that the measured speed is the one of a provider.
    leave_out_the_compiler()
    give_memory_back()
    try:
        device = choose_device(wanted.device)
    except PeerError as error:
        return tell(from_error("device", error))
    tell(
        judge_device(str(device), device_name(device), usable_cores(), has_nvidia_driver() and wanted.device == "auto")
    )
    available = available_bytes(device)
    tell(judge_memory(available, wanted.memory_bytes))
    try:
        speed = await machine_speed(device, lent_bytes(available, wanted.memory_bytes), fresh=True)
    except RuntimeError as error:
        # Out of memory, or a driver that does not fit: a stage would fail in the same way.
        reason = str(error).strip().splitlines()[0]
        return tell(
            CheckResult("speed", "problem", f"{device} fails when it computes: {reason}", "use another --device")
        )
    halves = {half: speed.flops_in(half) for half in HALVES}
    tell(judge_speed(speed.flops_per_second, speed.memory_bytes_per_second, halves))


def _look_at_disk() -> CheckResult:
    from ravnest.net.identity.private_files import make_private_folder
    from ravnest.provider.membership.joining import data_folder

    try:
        folder = data_folder() / "ravnest"
        make_private_folder(folder)
        if not os.access(folder, os.W_OK):
            fix = "check the folder's owner, or set XDG_DATA_HOME to a folder of yours"
            return CheckResult("disk", "problem", f"{folder}, where this machine's key is kept, cannot be written", fix)
        return judge_disk(str(folder), shutil.disk_usage(folder).free)
    except RavnestError as error:
        return from_error("disk", error)


async def _look_at_coordinator(line: str, listen: tuple[str, int], tell: Tell) -> None:
    from ravnest.net.identity.swarm_invite import SwarmInvite
    from ravnest.net.rpc.first_contact import pin_authority

    try:
        invite = SwarmInvite.parse(line)
    except PeerError as error:
        return tell(from_error("invite", error))
    for step in (_look_up, _connect):
        found = await step(invite)
        tell(found)
        if found.level == "problem":
            return
    try:
        authority = await pin_authority(invite)
    except PeerError as error:
        return tell(from_error("authority", error))
    tell(CheckResult("authority", "ok", "what answers is the swarm of the invite"))
    await _ask(invite, authority, listen, tell)


async def _look_up(invite: "SwarmInvite") -> CheckResult:
    try:
        loop = asyncio.get_running_loop()
        places = await loop.getaddrinfo(invite.host, invite.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return judge_name(invite.host, (), (error.strerror or str(error)).lower())
    return judge_name(invite.host, {str(place[4][0]) for place in places})


async def _connect(invite: "SwarmInvite") -> CheckResult:
    began = time.perf_counter()
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(invite.host, invite.port)
    except TimeoutError:
        return judge_connection(invite.address, 0.0, f"no answer within {CONNECT_SECONDS:g} seconds")
    except OSError as error:
        return judge_connection(invite.address, 0.0, _plain(error))
    seconds = time.perf_counter() - began
    writer.transport.abort()
    return judge_connection(invite.address, seconds)


async def _ask(invite: "SwarmInvite", authority: "Certificate", listen: tuple[str, int], tell: Tell) -> None:
    """The checks that only the coordinator can answer. They do not use up the invite."""
    from ravnest.net.identity.node_identity import joiner_keys
    from ravnest.net.rpc.client import CoordinatorClient
    from ravnest.provider.membership.joining import known_identity

    node = known_identity(invite, authority)
    known_as, known_client = "", None
    if node is not None:
        known_client = CoordinatorClient(invite.address, node.tls_keys(), f"the certificate of {node.node_id}")
    client = CoordinatorClient(invite.address, joiner_keys(invite.token, authority), "this invite")
    try:
        if known_client is not None and node is not None:
            try:
                await known_client.check(_check_request())
                known_as = node.node_id
            except PeerError as error:
                tell(from_error("identity", error, fix="ask the requester for a new invite"))
        accepted = await _check(client, known_as, tell)
        if not accepted and known_client is not None and known_as:
            # The invite has ended, but this machine is a member: the other checks use its own certificate.
            client, known_client = known_client, client
            accepted = True
        if accepted:
            tell(await _measure(client))
            reached = await reachable_from_outside(client, listen)
            if reached is not None:
                tell(reached)
    finally:
        await client.close()
        if known_client is not None:
            await known_client.close()


async def _check(client: "CoordinatorClient", known_as: str, tell: Tell) -> bool:
    """Whether the invite is valid. Reports that, and what the coordinator's answer shows about versions and clocks."""
    from ravnest.graph.portable import FORMAT_VERSION
    from ravnest.net.version import PROTOCOL_VERSION

    before = time.time()
    try:
        # The first call connects, because the time of the handshake would distort the clock check.
        await client.check(_check_request())
        before = time.time()
        reply = await client.check(_check_request())
    except PeerError as error:
        if "does not know this call" in str(error):
            tell(from_error("version", error))
        else:
            tell(judge_invite(False, str(error), known_as))
        return False
    after = time.time()
    ours = Versions(__version__, PROTOCOL_VERSION, FORMAT_VERSION)
    tell(judge_versions(ours, Versions(reply.version, reply.protocol, reply.graph_format)))
    tell(judge_clock(reply.unix_seconds - (before + after) / 2, (after - before) / 2))
    tell(judge_invite(reply.good, reply.reason, known_as))
    return reply.good


async def _measure(client: "CoordinatorClient") -> CheckResult:
    try:
        speed = await client.measure()
    except PeerError as error:
        return from_error("link", error, "warning", "try again later")
    return judge_link(speed.round_trip_seconds, speed.up_bytes_per_second, speed.down_bytes_per_second)


def _check_request() -> "CheckRequest":
    from ravnest.graph.portable import FORMAT_VERSION
    from ravnest.net.v1.control_pb2 import CheckRequest
    from ravnest.net.version import PROTOCOL_VERSION

    return CheckRequest(version=__version__, protocol=PROTOCOL_VERSION, graph_format=FORMAT_VERSION)


def has_nvidia_driver() -> bool:
    """Whether this machine has an NVIDIA GPU with a driver."""
    return Path("/proc/driver/nvidia/version").exists()


def _plain(error: OSError) -> str:
    # asyncio joins the reasons of several addresses in one text, without an error number.
    known = os.strerror(error.errno) if error.errno else error.strerror or str(error)
    return known.lower()

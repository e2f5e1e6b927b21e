"""Checks of `ravnest doctor`, each a function from facts to a result. No I/O, no torch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from ravnest import units

Level = Literal["ok", "warning", "problem"]

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH, FIRST_UNTRIED_TORCH = (2, 11), (2, 14)
LITTLE_MEMORY_BYTES, MIN_MEMORY_BYTES = 2 << 30, 256 << 20
LITTLE_DISK_BYTES, MIN_DISK_BYTES = 256 << 20, 1 << 20
SLOW_FLOPS_PER_SECOND = 5e9
SLOW_BYTES_PER_SECOND = 5e6 / 8
LONG_ROUND_TRIP_SECONDS = 0.3
CLOCK_WARNING_SECONDS, CLOCK_PROBLEM_SECONDS = 120.0, 20 * 3600.0
"""Certificates tolerate a clock that is a day wrong; beyond that no handshake succeeds."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check: its level, a sentence, and a fix if there is one."""

    check: str
    level: Level
    sentence: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of a Ravnest: the package, the protocol, and the graph format."""

    package: str
    protocol: int
    graph_format: int


def exit_code(findings: Collection[CheckResult]) -> int:
    """2 if some problem must be fixed first."""
    return 2 if any(finding.level == "problem" for finding in findings) else 0


def from_error(check: str, error: Exception, level: Level = "problem", fix: str = "") -> CheckResult:
    """The result for one of our own errors, whose message is a sentence and, after its last semicolon, the fix."""
    sentence, separator, told = str(error).rpartition("; ")
    return CheckResult(check, level, sentence, told) if separator else CheckResult(check, level, told, fix)


def judge_python(version: tuple[int, int]) -> CheckResult:
    shown, oldest = ".".join(map(str, version)), ".".join(map(str, OLDEST_PYTHON))
    if version < OLDEST_PYTHON:
        return CheckResult("python", "problem", f"Python {shown} is too old", f"install Python {oldest} or newer")
    return CheckResult("python", "ok", f"Python {shown}")


def judge_torch(version: str | None, import_error: str = "") -> CheckResult:
    oldest, newest = ".".join(map(str, OLDEST_TORCH)), f"{FIRST_UNTRIED_TORCH[0]}.{FIRST_UNTRIED_TORCH[1] - 1}"
    install = f"install PyTorch {oldest} to {newest} into the environment of ravnest"
    if version is None:
        return CheckResult("torch", "problem", "PyTorch is not installed", install)
    if import_error:
        return CheckResult(
            "torch", "problem", f"PyTorch {version} cannot be loaded ({import_error})", "install it again"
        )
    numbers = _numbers(version)
    if numbers < OLDEST_TORCH:
        return CheckResult("torch", "problem", f"PyTorch {version} is too old", install)
    if numbers >= FIRST_UNTRIED_TORCH:
        return CheckResult("torch", "warning", f"PyTorch {version} is newer than what Ravnest was tried with", install)
    return CheckResult("torch", "ok", f"PyTorch {version}")


def judge_device(device: str, name: str, cores: int, gpu_without_use: bool) -> CheckResult:
    if device == "cpu" and gpu_without_use:
        return CheckResult(
            "device",
            "warning",
            "this machine has an NVIDIA GPU that PyTorch does not use; the processor computes instead",
            "install PyTorch for CUDA, and check the driver with nvidia-smi",
        )
    count = f", {units.counted(cores, 'core')}" if device == "cpu" else ""
    return CheckResult("device", "ok", f"{device}: {name}{count}")


def judge_memory(available_bytes: int, cap_bytes: int | None) -> CheckResult:
    lent = available_bytes if cap_bytes is None else min(available_bytes, cap_bytes)
    free = units.byte_size(available_bytes)
    if lent < MIN_MEMORY_BYTES:
        what = f"{units.byte_size(lent)} of memory can be lent, which is too little for a stage"
        return CheckResult("memory", "problem", what, "close other programs, or lend more with --memory")
    if cap_bytes is not None and cap_bytes > available_bytes:
        what = f"--memory says {units.byte_size(cap_bytes)}, but only {free} are free; that is what is lent"
        return CheckResult("memory", "warning", what, "close other programs, or lend less")
    if lent < LITTLE_MEMORY_BYTES:
        what = f"{units.byte_size(lent)} of memory can be lent: enough for a small stage alone"
        return CheckResult("memory", "warning", what, "close other programs, or lend more with --memory")
    return CheckResult(
        "memory", "ok", f"{free} free" + ("" if lent == available_bytes else f", {units.byte_size(lent)} of it lent")
    )


def judge_speed(
    flops_per_second: float, memory_bytes_per_second: float, half_flops_per_second: Mapping[str, float]
) -> CheckResult:
    """`half_flops_per_second` is by the name of a mixed precision."""
    moved = f"{memory_bytes_per_second / 1e9:.3g} GB/s in memory"
    halves = ", ".join(f"{units.flops(figure)} in {name}" for name, figure in half_flops_per_second.items())
    what = f"{units.flops(flops_per_second)} in training ({halves}), {moved}"
    if flops_per_second < SLOW_FLOPS_PER_SECOND:
        return CheckResult("speed", "warning", f"{what}: this is slow", "end other programs that compute, or use a GPU")
    return CheckResult("speed", "ok", what)


def judge_disk(folder: str, free_bytes: int) -> CheckResult:
    what = f"{units.byte_size(free_bytes)} free in {folder}"
    fix = "free some space, or set XDG_DATA_HOME to a folder elsewhere"
    if free_bytes < MIN_DISK_BYTES:
        return CheckResult("disk", "problem", f"{what}: this machine's key cannot be kept", fix)
    if free_bytes < LITTLE_DISK_BYTES:
        return CheckResult("disk", "warning", f"{what}: the disk is nearly full", fix)
    return CheckResult("disk", "ok", what)


def judge_port(address: str, port: int, refusal: str) -> CheckResult:
    if refusal:
        fix = "choose another with --listen HOST:PORT; port 0 takes any free one"
        return CheckResult("port", "problem", f"cannot listen on {address}: {refusal}", fix)
    which = "" if port else ", on a free port"
    return CheckResult("port", "ok", f"can listen on {address}{which}")


def judge_reach(host: str, port: int, refusal: str) -> CheckResult:
    if refusal:
        fix = (
            "links will be dialled by the other side or go over the coordinator's relay; to spare that, let the router "
            "and the firewall pass a port on, and join with --listen 0.0.0.0:PORT"
        )
        return CheckResult("reach", "warning", f"the coordinator cannot dial this machine at {host}: {refusal}", fix)
    return CheckResult("reach", "ok", f"the coordinator can dial this machine at {host}, port {port}")


def judge_name(host: str, addresses: Collection[str], error: str = "") -> CheckResult:
    if not addresses:
        fix = "check the address in the invite, and that this machine is online"
        return CheckResult("name", "problem", f"there is no address for {host}" + (f" ({error})" if error else ""), fix)
    return CheckResult(
        "name", "ok", f"{host} is {', '.join(sorted(addresses)[:4])}" if {host} != set(addresses) else host
    )


def judge_connection(address: str, seconds: float, error: str = "") -> CheckResult:
    if error:
        return CheckResult(
            "connection",
            "problem",
            f"cannot connect to {address}: {error}",
            "check that the coordinator runs, and that its firewall and router let this port through",
        )
    return CheckResult("connection", "ok", f"{address} answers, after {units.milliseconds(seconds)}")


def judge_versions(ours: Versions, theirs: Versions) -> CheckResult:
    if (ours.protocol, ours.graph_format) != (theirs.protocol, theirs.graph_format):
        return CheckResult(
            "version",
            "problem",
            f"this machine runs Ravnest {_version(ours)}, the coordinator {_version(theirs)}",
            "update the older one",
        )
    if ours.package != theirs.package:
        what = f"this machine runs Ravnest {ours.package}, the coordinator {theirs.package}; they understand each other"
        return CheckResult("version", "ok", what)
    return CheckResult("version", "ok", f"both run Ravnest {ours.package}")


def judge_invite(good: bool, reason: str, known_as: str = "") -> CheckResult:
    """`known_as`: this machine has joined before, and the coordinator accepts its certificate under that name."""
    if good:
        return CheckResult("invite", "ok", reason)
    sentence, _, fix = reason.rpartition("; ")
    if known_as:
        again = f"this machine joined as {known_as} before and may come back without it"
        return CheckResult("invite", "warning", f"{sentence or fix}, but {again}", "join with the same --name as then")
    return CheckResult(
        "invite", "problem", sentence or reason, fix if sentence else "ask the requester for a new invite"
    )


def judge_clock(ahead_seconds: float, uncertain_seconds: float) -> CheckResult:
    """`ahead_seconds`: how far the coordinator's clock is ahead of ours."""
    off = max(0.0, abs(ahead_seconds) - uncertain_seconds)
    way = "behind" if ahead_seconds > 0 else "ahead of"
    what = f"the clock of this machine is {_duration(off)} {way} the coordinator's"
    fix = "let the clock be set over the network, on both machines"
    if off >= CLOCK_PROBLEM_SECONDS:
        return CheckResult("clock", "problem", f"{what}: certificates would not be accepted", fix)
    if off >= CLOCK_WARNING_SECONDS:
        return CheckResult("clock", "warning", what, fix)
    return CheckResult("clock", "ok", "the clocks agree" if off < 1 else what)


def judge_link(round_trip_seconds: float, up_bytes_per_second: float, down_bytes_per_second: float) -> CheckResult:
    down, up = units.megabits(down_bytes_per_second), units.megabits(up_bytes_per_second)
    trip = units.milliseconds(round_trip_seconds)
    what = f"{trip} there and back, {down} Mbit/s down, {up} Mbit/s up"
    if min(up_bytes_per_second, down_bytes_per_second) < SLOW_BYTES_PER_SECOND:
        return CheckResult("link", "warning", f"{what}: this is slow", "use a cable, or see what else uses the line")
    if round_trip_seconds > LONG_ROUND_TRIP_SECONDS:
        return CheckResult(
            "link", "warning", f"{what}: that is a long way", "use a cable, or leave a VPN that is far away"
        )
    return CheckResult("link", "ok", what)


def _numbers(version: str) -> tuple[int, ...]:
    first = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdecimal()) or 0) for part in first)


def _version(versions: Versions) -> str:
    return f"{versions.package} (protocol {versions.protocol}, graph format {versions.graph_format})"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.0f} hours"

"""Network namespaces, one per host, and the TUN device in each; named after their owner, so that leftovers are found.

A lab's name contains its owner's process id and start time. Any process may remove the remains of an owner that has
ended: `sweep` does so, and every new lab calls it.
"""

import ctypes
import errno
import fcntl
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "ravnest-wan"
RUNNING: Final = Path("/run") / PREFIX
"""Holds one folder per lab, and in it the control socket."""
DEVICE: Final = "eth0"

_NAMES: Final = Path("/run/netns")
_TUN: Final = "/dev/net/tun"
_TUNSETIFF: Final = 0x400454CA
_TUNSETOFFLOAD: Final = 0x400454D0
_IFF_TUN_NO_PI_VNET_HDR: Final = 0x0001 | 0x1000 | 0x4000
_CHECKSUM_AND_TCP4: Final = 0x01 | 0x02
_CLONE_NEWNET: Final = 0x40000000

# Fast links with a high latency need large windows; and the metrics of one connection must not affect the next.
_SYSCTLS: Final = {
    "tcp_rmem": "4096 131072 67108864",
    "tcp_wmem": "4096 65536 67108864",
    "tcp_no_metrics_save": "1",
}


def lab_name(serial: int) -> str:
    """A unique name on this machine for the `serial`-th lab of this process."""
    return f"{PREFIX}.{os.getpid()}.{_start_time(os.getpid())}.{serial}"


def namespace(lab: str, host: str) -> str:
    return f"{lab}.{host}"


def add(namespaces: Sequence[str]) -> None:
    """Creates the namespaces."""
    _ip("-batch", "-", text="".join(f"netns add {name}\n" for name in namespaces))


def configure(name: str, address: str) -> None:
    """Gives a namespace's device its address in a /24 and brings it up."""
    commands = [
        "link set lo up",
        f"address add {address}/24 dev {DEVICE}",
        f"link set {DEVICE} txqueuelen 2000 up",
    ]
    _ip("-n", name, "-batch", "-", text="\n".join(commands) + "\n")


def open_tun(name: str) -> int:
    """Creates the device of a namespace and returns its descriptor; closing the descriptor removes the device."""
    with inside(name):
        device = _tun()
        for key, value in _SYSCTLS.items():
            Path("/proc/sys/net/ipv4", key).write_text(value)
    # Without offloading the kernel hands over single packets: slower, but still correct.
    with suppress(OSError):
        fcntl.ioctl(device, _TUNSETOFFLOAD, _CHECKSUM_AND_TCP4)
    os.set_blocking(device, False)
    return device


def open_socket(name: str, kind: socket.SocketKind) -> socket.socket:
    """A socket of this process on a host's network."""
    with inside(name):
        return socket.socket(socket.AF_INET, kind)


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Moves only the calling thread into a namespace, for the duration of the block."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        target = os.open(_NAMES / name, os.O_RDONLY)
        try:
            _setns(target)
        finally:
            os.close(target)
        try:
            yield
        finally:
            _setns(home)
    finally:
        os.close(home)


def end_processes(lab: str) -> None:
    """Kills every process in a lab's namespaces, until none is left: a killed process may just have started another."""
    wanted = set()
    for name in _listed(lab):
        with suppress(OSError):
            wanted.add(os.stat(_NAMES / name).st_ino)
    while found := [pid for pid in _processes() if _network_of(pid) in wanted]:
        dying = []
        for pid in found:
            with suppress(ProcessLookupError):
                dying.append(os.pidfd_open(pid))
                signal.pidfd_send_signal(dying[-1], signal.SIGKILL)
        for descriptor in dying:
            select.select([descriptor], [], [])
            os.close(descriptor)


def remove(lab: str) -> None:
    """Ends a lab's processes, and removes its namespaces and its folder, if there are any."""
    end_processes(lab)
    for name in _listed(lab):
        # Another process may be removing the same remains.
        with suppress(LabError):
            _ip("netns", "delete", name)
    shutil.rmtree(RUNNING / lab, ignore_errors=True)


def sweep() -> list[str]:
    """Removes the remains of labs whose owner was killed; returns their names."""
    labs = {".".join(name.split(".")[:4]) for name in _listed()}
    if RUNNING.is_dir():
        labs |= {folder.name for folder in RUNNING.iterdir()}
    dead = [lab for lab in sorted(labs) if not _owner_lives(lab)]
    for lab in dead:
        remove(lab)
    return dead


def unavailable() -> str | None:
    """The reason why this machine cannot run a lab, with the remedy, or None if it can."""
    if not hasattr(os, "pidfd_open"):
        return "the WAN lab needs Linux 5.3 or newer"
    if shutil.which("ip") is None:
        return "the WAN lab needs the command `ip`: apt-get install iproute2"
    if not os.path.exists(_TUN):
        return f"the WAN lab needs {_TUN}: modprobe tun, or give the container that device"
    probe = namespace(
        lab_name(-1), "probe"
    )  # named like a lab, so that it is removed later if this process is killed here
    try:
        add([probe])
        try:
            os.close(open_tun(probe))
        finally:
            _ip("netns", "delete", probe)
    except (LabError, OSError) as error:
        return (
            f"the WAN lab may not create network namespaces or TUN devices here ({error}): run it as root, "
            "or in a user namespace as docs/wan-lab.md shows"
        )
    return None


class LabError(RuntimeError):
    """The lab could not be built, or is gone."""


def _ip(*arguments: str, text: str = "") -> None:
    done = subprocess.run(["ip", *arguments], input=text, capture_output=True, text=True)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise LabError(f"`ip {' '.join(arguments)}` failed: {reason}")


def _tun() -> int:
    device = os.open(_TUN, os.O_RDWR)
    try:
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN_NO_PI_VNET_HDR))
    except OSError:
        os.close(device)
        raise
    return device


def _setns(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def _listed(lab: str = PREFIX) -> list[str]:
    try:
        return [name for name in os.listdir(_NAMES) if name.startswith(f"{lab}.")]
    except FileNotFoundError:
        return []


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and int(entry) != os.getpid()]


def _network_of(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH, errno.EACCES):
            return None
        raise


def _owner_lives(lab: str) -> bool:
    try:
        _, pid, start, _ = lab.split(".")
        return _start_time(int(pid)) == int(start) and not _is_zombie(int(pid))
    except (ValueError, OSError):
        return False


def _start_time(pid: int) -> int:
    """Start time of a process, in the kernel's ticks; together with the pid it identifies a process."""
    return int(_stat(pid)[19])


def _is_zombie(pid: int) -> bool:
    return _stat(pid)[0] in "ZX"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the program's name, which may contain blanks and brackets."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

"""`ravnest join INVITE`: lend this machine to a coordinator."""

import argparse
import math
from typing import TYPE_CHECKING

from ravnest import units
from ravnest.cores import usable_cores

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: "Subparsers") -> None:
    """Add the command and its arguments."""
    parser = subparsers.add_parser(
        "join",
        help="lend this machine to a coordinator",
        description="Lend this machine: join the coordinator of an invite and hold one stage of its model.",
    )
    parser.add_argument(
        "invite", metavar="INVITE", help="what the coordinator printed, ravnest://...; - reads it from standard input"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps (default: auto)")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        type=memory_bytes,
        help="memory to lend, such as 8GB (default: what is free)",
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        type=host_and_port,
        help="address for neighbouring stages; port 0 takes a free one (default: 0.0.0.0:0, every address)",
    )
    parser.add_argument(
        "--advertise",
        metavar="HOST:PORT",
        type=host_and_port,
        help="where neighbouring stages reach this machine (default: the address it reaches the coordinator from)",
    )
    parser.add_argument(
        "--outbound-only",
        action="store_true",
        help="do not listen: links run over connections that this machine makes (found out by itself otherwise)",
    )
    parser.add_argument(
        "--cache",
        metavar="SIZE",
        type=cache_bytes,
        help="how much of stages to keep on this disk, so that they need not be fetched again; 0 keeps nothing "
        "(default: 20GiB, and no more than half of the free space)",
    )
    parser.add_argument(
        "--cores",
        metavar="N",
        type=core_count,
        help="cores to compute with (default: all of them, shared fairly with the other providers on this machine)",
    )
    pretending = parser.add_mutually_exclusive_group()
    pretending.add_argument(
        "--pretend-slower",
        metavar="FACTOR",
        type=slower,
        default=1.0,
        help="compute as a machine that is so many times slower, such as 2.5, to try out a swarm of unequal machines",
    )
    pretending.add_argument(
        "--pretend-seconds",
        metavar="FORWARD,BACKWARD",
        type=stage_seconds,
        help="compute as a machine on which any stage takes so long, such as 0.05,0.1, to try out long pipelines",
    )
    parser.add_argument("--name", help="what to call this provider (default: this machine's name)")
    # A provider that `ravnest train` started ends with its parent and leaves the talking to it.
    parser.add_argument("--embedded", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Provide until the coordinator ends the run; raises a RavnestError when that cannot be done."""
    from ravnest.provider.machine.core_claims import CoreClaim

    # Before the slow imports: others that start at the same time are seen by then.
    claim = CoreClaim.make(args.cores)
    from ravnest.engine.speed.pace import Pretence, StageSeconds
    from ravnest.provider import agent

    seconds = None if args.pretend_seconds is None else StageSeconds(*args.pretend_seconds)
    return agent.run(
        args.invite,
        device=args.device,
        memory_bytes=args.memory,
        listen=args.listen,
        advertise=args.advertise,
        name=args.name,
        outbound_only=args.outbound_only,
        cache_bytes=args.cache,
        pretence=Pretence(args.pretend_slower, seconds),
        claim=claim,
        embedded=args.embedded,
    )


def memory_bytes(text: str) -> int:
    """Bytes in `8GB`, `512MiB`, `1.5G` or a plain number; raises ArgumentTypeError for anything else."""
    size = units.parse_byte_size(text)
    if size is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write it as 8GB, 512MB or 4GiB")
    return size


def cache_bytes(text: str) -> int:
    """Bytes as in `memory_bytes`, or 0; raises ArgumentTypeError for anything else."""
    return 0 if text.strip() == "0" else memory_bytes(text)


def core_count(text: str) -> int:
    """How many cores, from 1 to as many as this process may use; raises ArgumentTypeError for anything else."""
    most = usable_cores()
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not how many cores to compute with: give a whole number from 1 to {most}, the cores that "
            "this process may use"
        )
    return int(text)


def slower(text: str) -> float:
    """How many times slower, a number of at least 1; raises ArgumentTypeError for anything else."""
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 <= factor < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not how many times slower: give a number of at least 1")
    return factor


def stage_seconds(text: str) -> tuple[float, float]:
    """Seconds of a forward and of a backward in `0.05,0.1`; raises ArgumentTypeError for anything else."""
    try:
        forward, backward = map(float, text.split(","))
    except ValueError:
        forward = backward = 0.0
    if not (0 < forward < math.inf and 0 < backward < math.inf):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not how long a forward and a backward take: give seconds of each, such as 0.05,0.1"
        )
    return forward, backward


def host_and_port(text: str) -> tuple[str, int]:
    """Host and port in `127.0.0.1:7000` or `[::1]:7000`; raises ArgumentTypeError for anything else."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    if not colon or not bare or (":" in bare and not bracketed) or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address: write it as HOST:PORT, such as 127.0.0.1:0")
    return bare, int(port)

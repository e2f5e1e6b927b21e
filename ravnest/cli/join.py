"""`ravnest join INVITE`: lends this machine to a coordinator."""

import argparse
import math
from pathlib import Path

from ravnest import units
from ravnest.cli.arguments import Subparsers, byte_rate
from ravnest.cores import usable_cores


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command and its arguments."""
    parser = subparsers.add_parser(
        "join",
        help="lend this machine to a coordinator",
        description="Lend this machine: join the coordinator of an invite and train one stage of its model.",
    )
    parser.add_argument(
        "invite",
        metavar="INVITE",
        help="the line that the coordinator printed, ravnest://...; - reads it from standard input",
    )
    parser.add_argument("--name", help="name of this provider (default: the name of this machine)")
    _add_machine_arguments(parser)
    _add_network_arguments(parser)
    # `ravnest train` sets it for the providers that it starts: they end with it and print nothing.
    parser.add_argument("--embedded", action="store_true", help=argparse.SUPPRESS)
    _add_traffic_arguments(parser)
    parser.set_defaults(run=run)


def _add_traffic_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--upload-limit",
        metavar="RATE",
        type=byte_rate,
        default=math.inf,
        help="largest rate of everything that this machine sends, such as 2MB/s or 16Mbit/s (default: no limit)",
    )
    parser.add_argument(
        "--download-limit",
        metavar="RATE",
        type=byte_rate,
        default=math.inf,
        help="largest rate of everything that it receives, such as 10MB/s (default: no limit)",
    )
    parser.add_argument(
        "--monthly-cap",
        metavar="SIZE",
        type=memory_bytes,
        default=math.inf,
        help="data to send and receive in a calendar month, such as 200GB; then this machine leaves (default: no cap)",
    )


def _add_network_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        type=host_and_port,
        help="address to accept other providers on; port 0 means any free port (default: 0.0.0.0:0, a free port on all "
        "network interfaces)",
    )
    parser.add_argument(
        "--advertise",
        metavar="HOST:PORT",
        type=host_and_port,
        help="address at which other providers reach this machine (default: the address from which it reaches the "
        "coordinator)",
    )
    parser.add_argument(
        "--outbound-only",
        action="store_true",
        help="do not open a port; use outgoing connections only (default: detected automatically)",
    )


def _add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 or mps (default: auto)")
    parser.add_argument(
        "--memory", metavar="SIZE", type=memory_bytes, help="memory to lend, such as 8GB (default: the free memory)"
    )
    parser.add_argument(
        "--cache",
        metavar="SIZE",
        type=cache_bytes,
        help="disk space for caching downloaded stages; 0 disables the cache (default: 20GiB, but at most half of the "
        "free space)",
    )
    parser.add_argument(
        "--weights",
        metavar="FOLDER",
        type=weights_folder,
        action="append",
        help="folder with safetensors files: weights that are found there, by their hash, are not downloaded; may be "
        "repeated; none reads no files (default: the Hugging Face cache of this user, if there is one)",
    )
    parser.add_argument(
        "--cores",
        metavar="N",
        type=core_count,
        help="number of CPU cores to use (default: all cores, divided equally among the providers on this machine)",
    )
    pretending = parser.add_mutually_exclusive_group()
    pretending.add_argument(
        "--pretend-slower",
        metavar="FACTOR",
        type=slower,
        default=1.0,
        help="simulate a machine that is slower by this factor, such as 2.5, to test a swarm of unequal machines",
    )
    pretending.add_argument(
        "--pretend-seconds",
        metavar="FORWARD,BACKWARD",
        type=stage_seconds,
        help="simulate a machine on which any stage takes these seconds, such as 0.05,0.1, to test long pipelines",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the provider until the coordinator ends the run; raises a RavnestError if it cannot join or continue."""
    from ravnest.provider.machine.core_claims import CoreClaim

    # Claimed before the slow imports, so that providers that start at the same time see one another's claims.
    claim = CoreClaim.make(args.cores)
    from ravnest.engine.speed.pretended_pace import Pretence, StageSeconds
    from ravnest.net.pacing.traffic_limit import UserLimits
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
        weights=None if args.weights is None else [folder for folder in args.weights if folder is not None],
        pretence=Pretence(args.pretend_slower, seconds),
        claim=claim,
        embedded=args.embedded,
        limits=UserLimits(args.upload_limit, args.download_limit, args.monthly_cap),
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


def weights_folder(text: str) -> Path | None:
    """The folder, or None for `none`; raises ArgumentTypeError if there is no such folder."""
    if text == "none":
        return None
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text!r}: give one with safetensors files, or none")
    return folder


def core_count(text: str) -> int:
    """A number of cores from 1 to the number that this process may use; raises ArgumentTypeError for anything else."""
    maximum = usable_cores()
    if not text.isdecimal() or not 1 <= int(text) <= maximum:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of cores: give a whole number from 1 to {maximum}, the cores that this process "
            "may use"
        )
    return int(text)


def slower(text: str) -> float:
    """A factor of at least 1; raises ArgumentTypeError for anything else."""
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 <= factor < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a factor: give a number of at least 1")
    return factor


def stage_seconds(text: str) -> tuple[float, float]:
    """Seconds of a forward and of a backward in `0.05,0.1`; raises ArgumentTypeError for anything else."""
    try:
        forward, backward = map(float, text.split(","))
    except ValueError:
        forward = backward = 0.0
    if not (0 < forward < math.inf and 0 < backward < math.inf):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a pair of durations: give the seconds of a forward and a backward, such as 0.05,0.1"
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

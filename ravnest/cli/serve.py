"""`ravnest serve JOB --listen HOST:PORT`: the coordinator for a swarm of machines, and the invite to it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ravnest.cli.join import host_and_port
from ravnest.cli.train import whole_number

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: "Subparsers") -> None:
    """Add the command and its arguments."""
    parser = subparsers.add_parser(
        "serve",
        help="train a job on machines that join with an invite",
        description="Train a job on other machines: print an invite, wait until enough providers have joined with it, "
        "and train.",
    )
    parser.add_argument("job", metavar="JOB", help="path/to/file.py, file.py:name or package.module:name")
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        type=host_and_port,
        help="where to wait for providers, such as 0.0.0.0:7700 for every address of this machine (default, with "
        "--resume alone: where it was before)",
    )
    parser.add_argument(
        "--advertise",
        metavar="HOST:PORT",
        type=host_and_port,
        help="what the invite says where this differs from --listen, such as a router's public address",
    )
    parser.add_argument(
        "--providers",
        metavar="N",
        type=whole_number,
        help="begin when this many have joined (default: when those that have joined have the memory for the model "
        "together; with --resume as many as before)",
    )
    parser.add_argument(
        "--clusters",
        metavar="C",
        type=whole_number,
        help="how many clusters they make up, each with a whole copy of the model, which average what they learn; with "
        "--providers each of those gets a stage (default: as many as are fastest, of those that help; with --resume "
        "what was said before)",
    )
    parser.add_argument(
        "--run",
        dest="directory",
        metavar="DIR",
        type=Path,
        help="the run directory, new or empty (default: runs/NAME-DATE-TIME)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the last checkpoint of the run directory; the providers of before may join again",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="replace a setting of the job, such as epochs=3 or pipeline.in_flight=2; may be repeated",
    )
    parser.add_argument("--no-display", action="store_true", help="plain log lines instead of the live display")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve, train and return the exit code; raises a RavnestError when the run cannot start or go on."""
    if args.listen is None and not args.resume:
        from ravnest.errors import RunError

        raise RunError("say where to wait for providers with --listen HOST:PORT, such as --listen 0.0.0.0:7700")

    from ravnest.coordinator.launch.serve import serve_from_reference

    return serve_from_reference(
        args.job,
        listen=args.listen,
        advertise=args.advertise,
        providers=args.providers,
        clusters=args.clusters,
        run=args.directory,
        resume=args.resume,
        overrides=args.overrides,
        display=not args.no_display,
    )

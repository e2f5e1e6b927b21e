"""`ravnest train JOB`: everything on this machine, one command."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: "Subparsers") -> None:
    """Add the command and its arguments."""
    parser = subparsers.add_parser(
        "train",
        help="train a job on an embedded swarm of providers on this machine",
        description="Train a job on an embedded swarm: a coordinator and its providers, all on this machine.",
    )
    parser.add_argument("job", metavar="JOB", help="path/to/file.py, file.py:name or package.module:name")
    parser.add_argument(
        "--providers",
        metavar="N",
        type=whole_number,
        default=2,
        help="how many providers, each with one stage of the model (default: 2)",
    )
    parser.add_argument(
        "--clusters",
        metavar="C",
        type=whole_number,
        default=1,
        help="how many clusters they make up, each with a whole copy of the model, which average what they learn "
        "(default: 1)",
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
        help="continue from the last checkpoint of the run directory (default: the newest run of this job)",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="replace a setting of the job, such as epochs=3 or pipeline.in_flight=2; may be repeated",
    )
    parser.add_argument(
        "--device",
        dest="devices",
        metavar="DEVICES",
        type=lambda text: text.split(","),
        default=["auto"],
        help="auto, cpu, cuda:0 or mps; several, split by commas, are taken by the providers in turn (default: auto)",
    )
    parser.add_argument("--no-display", action="store_true", help="plain log lines instead of the live display")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train and return the exit code; raises a RavnestError when the run cannot start or go on."""
    from ravnest.coordinator.launch import embedded

    return embedded.train_from_reference(
        args.job,
        providers=args.providers,
        clusters=args.clusters,
        run=args.directory,
        resume=args.resume,
        overrides=args.overrides,
        display=not args.no_display,
        devices=args.devices,
    )


def whole_number(text: str) -> int:
    """A number of at least 1; raises ArgumentTypeError for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)

"""`ravnest train JOB`: train on an embedded swarm, all on this machine."""

import argparse

from ravnest.cli.arguments import Subparsers, add_job_arguments, whole_number


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command and its arguments."""
    parser = subparsers.add_parser(
        "train",
        help="train a job on this machine, on an embedded swarm of providers",
        description="Train a job on an embedded swarm: a coordinator and its providers, all processes of this machine. "
        "Ctrl-C stops the run cleanly: its state is saved, and --resume continues it.",
    )
    add_job_arguments(parser)
    parser.add_argument(
        "--providers",
        metavar="N",
        type=whole_number,
        default=2,
        help="number of providers, each with one stage of the model (default: 2)",
    )
    parser.add_argument(
        "--clusters",
        metavar="C",
        type=whole_number,
        default=1,
        help="number of clusters; each trains a full copy of the model on its share of the providers, and the clusters "
        "average their parameters (default: 1)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the last checkpoint in --run (default: in the newest run of this job)",
    )
    parser.add_argument(
        "--device",
        dest="devices",
        metavar="DEVICES",
        type=lambda text: text.split(","),
        default=["auto"],
        help="auto, cpu, cuda:0 or mps; the providers take turns through a comma-separated list (default: auto)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Trains and returns the exit code; raises a RavnestError if the run cannot start or continue."""
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

"""`ravnest serve JOB --listen HOST:PORT`: coordinator of a swarm of machines, which join by an invite."""

import argparse

from ravnest.cli.arguments import Subparsers, add_job_arguments, byte_rate, whole_number
from ravnest.cli.join import host_and_port


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command and its arguments."""
    parser = subparsers.add_parser(
        "serve",
        help="train a job on machines that join with an invite",
        description="Train a job on other machines: print an invite line, wait until enough providers have joined with "
        "it, and train. Ctrl-C stops the run cleanly: its state is saved, and --resume continues it.",
    )
    add_job_arguments(parser)
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        type=host_and_port,
        help="address to accept providers on; 0.0.0.0:7700 means port 7700 on all network interfaces (required, except "
        "with --resume, where the default is the previous address)",
    )
    parser.add_argument(
        "--advertise",
        metavar="HOST:PORT",
        type=host_and_port,
        help="address in the invite, if it differs from --listen, such as the public address of a router",
    )
    parser.add_argument(
        "--providers",
        metavar="N",
        type=whole_number,
        help="start when this many providers have joined (default: as soon as their total memory holds the model; with "
        "--resume, those of before have a minute to come back)",
    )
    parser.add_argument(
        "--clusters",
        metavar="C",
        type=whole_number,
        help="number of clusters; each trains a full copy of the model, and the clusters average their parameters; "
        "with --providers, each of those gets a stage (default: the number with the highest predicted throughput; with "
        "--resume: the previous value)",
    )
    for way, verb in (("upload", "sends"), ("download", "receives")):
        parser.add_argument(
            f"--{way}",
            metavar="RATE",
            type=byte_rate,
            help=f"rate at which this machine {verb} over the internet, such as 20Mbit/s: the plan counts the inputs "
            "that it feeds and their results against it (default: the best rate that a provider measures)",
        )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the last checkpoint in the run directory; the previous providers may rejoin",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serves, trains and returns the exit code; raises a RavnestError if the run cannot start or continue."""
    if args.listen is None and not args.resume:
        from ravnest.errors import RunError

        raise RunError(
            "no address to accept providers on: give one with --listen HOST:PORT, such as --listen 0.0.0.0:7700"
        )

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
        upload_bytes_per_second=args.upload,
        download_bytes_per_second=args.download,
    )

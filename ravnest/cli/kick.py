"""`ravnest kick RUN NODE`: remove a provider from a swarm permanently."""

import argparse
import time
from pathlib import Path

from ravnest.cli.arguments import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command and its arguments."""
    parser = subparsers.add_parser(
        "kick",
        help="remove a provider from a served run permanently",
        description="Remove a provider permanently: its certificate is revoked and its connections are closed within "
        "seconds. If it holds a stage, training continues without it: a standby takes over the stage, or the model is "
        "re-partitioned over the remaining providers. If they cannot hold the model, the run waits for another "
        "provider.",
    )
    parser.add_argument("path", metavar="RUN", type=Path, help="run directory")
    parser.add_argument(
        "node", metavar="NODE", help="name of the provider, as shown by `ravnest status` and `ravnest invite`"
    )
    parser.add_argument("--reason", default="", help="reason that the provider is told")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Removes the provider; raises RunError if the run was never served, or has no such node."""
    from ravnest.coordinator.access.admission import Admission

    admission = Admission.of_run(args.path)
    try:
        admission.tokens.kick(args.node, time.time(), args.reason)
    finally:
        admission.close()
    print(f"{args.node} is removed from the run; it cannot rejoin with its key or its certificate")
    return 0

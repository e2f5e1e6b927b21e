"""`ravnest kick RUN NODE`: throw a provider out of a swarm for good."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: "Subparsers") -> None:
    """Add the command and its arguments."""
    parser = subparsers.add_parser(
        "kick",
        help="throw a provider out of a run that is served",
        description="Throw a provider out for good: its certificate counts no more and its connections end within "
        "seconds. If it holds a stage, training goes on without it: a standby takes the stage, or the others share the "
        "model anew. If they cannot hold the model, the run waits for another provider.",
    )
    parser.add_argument("path", metavar="RUN", type=Path, help="the run directory")
    parser.add_argument(
        "node", metavar="NODE", help="the provider's name, as `ravnest status` or `ravnest invite` show it"
    )
    parser.add_argument("--reason", default="", help="what to tell it")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Throw it out; raises a RunError when the run is not one that was served, or has no such node."""
    from ravnest.coordinator.access.admission import Admission

    admission = Admission.of_run(args.path)
    try:
        admission.tokens.kick(args.node, time.time(), args.reason)
    finally:
        admission.close()
    print(f"{args.node} is thrown out; it cannot come back with its key or its certificate")
    return 0

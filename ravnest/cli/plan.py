"""`ravnest plan JOB --nodes nodes.toml`: the plan and the predicted throughput of a job, without training."""

import argparse
import io
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ravnest.cli.arguments import Subparsers, add_job, add_overrides, whole_number

if TYPE_CHECKING:
    from ravnest.preview.dry_run import DryRun


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command and its arguments."""
    parser = subparsers.add_parser(
        "plan",
        help="show how a job would be trained on the machines of a file",
        description="Dry run: capture and profile the job on this machine, and plan it for the machines of a file. "
        "Shows the stage of each machine, the memory that it needs, and the predicted samples/s. Nothing is trained. "
        "Exit code 2 if the model does not fit the machines.",
    )
    add_job(parser)
    parser.add_argument(
        "--nodes",
        metavar="FILE",
        type=Path,
        required=True,
        help="file with the machines and their links; docs/planning.md describes it, examples/nodes.toml is an example",
    )
    parser.add_argument("--json", action="store_true", help="print the whole plan as JSON, for other programs")
    parser.add_argument(
        "--clusters",
        metavar="N",
        type=whole_number,
        help="maximum number of clusters (default: the number with the highest predicted throughput)",
    )
    parser.add_argument(
        "--stages",
        metavar="N",
        type=whole_number,
        default=1,
        help="minimum number of stages in each cluster; with 2, no machine holds the whole model (default: 1)",
    )
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=_seconds,
        help="time to search for a better plan (default: until improvements become very small)",
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=_seed,
        default=0,
        help="seed of the search; the same seed gives the same plan (default: 0)",
    )
    add_overrides(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan; raises a RavnestError for a mistake in the job or the file, or if the model does not fit."""
    # Mistakes in the reference and in the file are reported before torch is imported.
    from ravnest.coordinator.launch.interrupts import Interrupts
    from ravnest.preview.nodes_file import read_nodes
    from ravnest.reference import parse_reference

    def tell(phase: str) -> None:
        print(f"{phase} ...", file=sys.stderr, flush=True)

    title = parse_reference(args.job).title
    nodes = read_nodes(_file(args.nodes), str(args.nodes))
    with Interrupts() as interrupts, _stdout_redirected():
        tell("loading the job")
        from ravnest.preview.dry_run import dry_run

        interrupts.check()
        planned = dry_run(
            args.job,
            nodes,
            title=title,
            overrides=args.overrides,
            max_clusters=args.clusters,
            min_stages=args.stages,
            seed=args.seed,
            seconds=args.seconds,
            interrupts=interrupts,
            tell=tell,
        )
    if args.json:
        from ravnest.preview.as_json import plan_json

        print(json.dumps(plan_json(planned), indent=2))
    else:
        _show(planned)
    return 0


def _file(path: Path) -> bytes:
    from ravnest.errors import PlanError
    from ravnest.preview.nodes_file import MAX_BYTES

    try:
        with path.open("rb") as file:
            # One byte more than the limit, so that a larger file is noticed without reading all of it.
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror}; give --nodes the file with the machines") from None


def _show(planned: "DryRun") -> None:
    from rich.console import Console

    from ravnest.preview.as_text import print_plan
    from ravnest.preview.diagram import PLAIN

    encoding = (sys.stdout.encoding or "").lower()
    if "utf" in encoding:
        print_plan(planned, Console(highlight=False, soft_wrap=False))
        return
    written = io.StringIO()
    print_plan(planned, Console(file=written, highlight=False, width=Console().width))
    text = written.getvalue().translate(PLAIN)
    sys.stdout.write(text.encode(encoding or "ascii", "replace").decode(encoding or "ascii"))


@contextmanager
def _stdout_redirected() -> Iterator[None]:
    """Redirects the output of the job file and of data loader workers to stderr, so that stdout has the plan alone."""
    sys.stdout.flush()
    try:
        ours, theirs = sys.stdout.fileno(), sys.stderr.fileno()
    except (OSError, ValueError):
        # In a test or a notebook, stdout may not be a file.
        yield
        return
    kept = os.dup(ours)
    os.dup2(theirs, ours)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, ours)
        os.close(kept)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _seed(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)

"""`ravnest report RUN`: a page about a run, with a picture of how its stages worked, from its run directory."""

import argparse
from pathlib import Path
from typing import Any

from ravnest.errors import RunError
from ravnest.monitor.run_directory import existing_run


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the command to what `ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report",
        help="write a page about a run, with a picture of how its stages worked",
        description="Write an HTML page about a run: how it ended, and when each of its stages did what.",
    )
    parser.add_argument("path", metavar="RUN", type=Path, help="the run directory")
    parser.add_argument("--out", metavar="FILE", type=Path, help="the file to write; default: report.html in the run")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Writes the page and says where; RunError when there is no run, or the disk refuses."""
    from ravnest.monitor.files import write_atomic
    from ravnest.monitor.report_page import report_page
    from ravnest.monitor.summary import Summary
    from ravnest.monitor.trace import Trace

    paths = existing_run(args.path)
    out: Path = args.out or paths.report_path
    if out.is_dir():
        raise RunError(f"{out} is a folder; give --out a file name, such as {out / 'report.html'}.")
    if not paths.summary_path.exists():
        raise RunError(f"{paths.path} has nothing to report yet; wait until the run has begun to train.")
    summary = Summary.read(paths.summary_path)
    trace = Trace.read(paths.trace_path) if paths.trace_path.exists() else None
    write_atomic(out, report_page(paths.path.absolute().name, summary, trace))
    print(f"wrote {out}" + ("" if trace is not None else " (the run has no trace)"))
    return 0

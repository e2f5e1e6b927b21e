"""`ravnest report RUN`: HTML report of a run, with a timeline of its stages."""

import argparse
from pathlib import Path

from ravnest.cli.arguments import Subparsers
from ravnest.errors import RunError
from ravnest.monitor.run_directory import existing_run


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command and its arguments."""
    parser = subparsers.add_parser(
        "report",
        help="write an HTML report of a run, with a timeline of its stages",
        description="Write an HTML report of a run: its result, and for each stage its figures and a timeline.",
    )
    parser.add_argument("path", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--out", metavar="FILE", type=Path, help="file to write (default: report.html in RUN)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the report and prints the path; raises RunError if there is no run, or the disk fails."""
    from ravnest.monitor.files import write_atomic
    from ravnest.monitor.report_page import report_page
    from ravnest.monitor.summary import Summary
    from ravnest.monitor.trace import Trace

    paths = existing_run(args.path)
    out: Path = args.out or paths.report_path
    if out.is_dir():
        raise RunError(f"{out} is a folder; give --out a file name, such as {out / 'report.html'}")
    if not paths.summary_path.exists():
        raise RunError(f"{paths.path} has nothing to report yet; wait until training has started")
    summary = Summary.read(paths.summary_path)
    trace = Trace.read(paths.trace_path) if paths.trace_path.exists() else None
    write_atomic(out, report_page(paths.path.absolute().name, summary, trace))
    print(f"wrote {out}" + ("" if trace is not None else " (the run has no trace)"))
    return 0

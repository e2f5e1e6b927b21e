"""Arguments that several commands take, and parsers of their values."""

import argparse
from pathlib import Path
from typing import TypeAlias

from ravnest import units

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds JOB, --run, --set and --no-display, which every command that trains takes."""
    add_job(parser)
    parser.add_argument(
        "--run",
        dest="directory",
        metavar="DIR",
        type=Path,
        help="run directory, new or empty (default: runs/NAME-DATE-TIME)",
    )
    add_overrides(parser)
    parser.add_argument("--no-display", action="store_true", help="print plain log lines instead of the live display")


def add_job(parser: argparse.ArgumentParser) -> None:
    """Adds JOB."""
    parser.add_argument("job", metavar="JOB", help="path/to/file.py, file.py:name or package.module:name")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Adds --set."""
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override a setting of the job, such as epochs=3 or pipeline.in_flight=2; may be repeated",
    )


def whole_number(text: str) -> int:
    """A number of at least 1; raises ArgumentTypeError for anything else."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def byte_rate(text: str) -> float:
    """Bytes per second in `2MB/s` or `16Mbit/s`; raises ArgumentTypeError for anything else, and for too little."""
    from ravnest.net.pacing.traffic_limit import MIN_RATE

    rate = units.parse_byte_rate(text)
    if rate is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate: write it as 2MB/s, 500KB/s or 16Mbit/s")
    if rate < MIN_RATE:
        raise argparse.ArgumentTypeError(f"{text!r} is too little to take part with: give at least 10KB/s")
    return rate

"""Homes: training over home lines, with checkpoints, replicas and rounds, next to the same run without any of them.

Each case is a population of homes (named, or drawn from a seed out of published figures of home lines) and a model with
many parameters and little compute. `ravnest serve` and `ravnest join` run on the hosts of a WAN lab, with the default
settings; a second run has no checkpoints by time, no rounds and no replicas. Each home pretends to be so much slower
that all of them together leave half of this machine's cores idle.

- `samples_per_second` is the rate from one minute after the first update on, `of predicted` relative to the plan.
- `of no state` is that rate relative to the run without state.
- `lost` counts providers, stages and clusters that were given up.
- `latest round` is the round that was latest, relative to its predicted duration.
- `stages gb h` and `state gb h` are the gigabytes that the machine with the largest such figure sends per hour, between
  stages and as state. State is what a machine sends beyond its activations and what goes with them, by comparison with
  the run without state; `--json` has every machine.
- `finish` is the time from the end of the data to the end of the run, with its last checkpoint.

Part `kills`: every machine is killed in turn, at drawn moments, and comes back. `seconds` are from the kill until every
affected stage has made an update, `told seconds` what the run had told that a lost machine costs. Then all machines and
the coordinator are killed at once and started again with the same disks: `samples lost` is the training that was lost,
`lost seconds` the same in seconds.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.homes_parts.cases import CASES, QUICK, Case
from benchmarks.homes_parts.kills import kill_all_in_turn
from benchmarks.homes_parts.ours import run
from benchmarks.homes_parts.rows import kill_rows, kill_targets, run_row, run_targets
from benchmarks.report import Row, Target, finish, say
from tests.wan import Lab

_PARTS = ("state", "kills")
_FAILURES = (RuntimeError, TimeoutError, ValueError)


def main() -> int:
    given = _arguments()
    if reason := Lab.unavailable():
        say(f"the WAN lab is not available: {reason}")
        return 2
    rows: list[Row] = []
    targets: list[Target] = []
    parts: dict[str, Callable[[Case, Path, argparse.Namespace], tuple[list[Row], list[Target]]]]
    parts = {"state": _state, "kills": _kills}
    for name in given.only:
        case = CASES[name]
        if given.seconds is not None:
            case = replace(case, measure_seconds=given.seconds)
        for part in given.part:
            with tempfile.TemporaryDirectory(prefix="ravnest-homes-") as temporary:
                folder = Path(temporary) if given.keep is None else given.keep / f"{name}-{part}"
                more_rows, more_targets = parts[part](case, folder, given)
                rows += more_rows
                targets += more_targets
    return finish("homes", given, rows, targets)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.homes", description="Training over home lines.")
    parser.add_argument("--quick", action="store_true", help="one small case, within two minutes")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the result to this file")
    parser.add_argument("--record", action="store_true", help="also write the table to benchmarks/history/")
    parser.add_argument("--only", choices=CASES, action="append", help="run only this case; may be repeated")
    parser.add_argument("--part", choices=_PARTS, action="append", help="measure only this; may be repeated")
    parser.add_argument("--kills", type=int, help="machines to kill one after the other (default: each)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the moments of the kills (default: 1)")
    parser.add_argument("--seconds", type=float, help="measured seconds of each run, instead of the case's own")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="new folder for the run directories and all output")
    given = parser.parse_args()
    given.only = given.only or ([QUICK.name] if given.quick else [name for name in CASES if name != QUICK.name])
    given.part = given.part or list(_PARTS[:1] if given.quick else _PARTS)
    if given.keep is not None:
        given.keep = given.keep.absolute()
    return given


def _state(case: Case, folder: Path, given: argparse.Namespace) -> tuple[list[Row], list[Target]]:
    """The case as users start it, and without state."""
    found = {}
    for name, with_state in (("with state", True), ("without state", False)):
        say(f"{case.title}, {name}: {case.population.lines}")
        try:
            found[name] = run(case, folder / name.replace(" ", "-"), with_state=with_state)
        except _FAILURES as error:
            say(f"{case.title}, {name}: {error}")
            return _failed(f"{case.title}, {name}")
        say(f"{case.title}, {name}: {found[name]}")
    own, bare = found["with state"], found["without state"]
    return (
        [run_row(case.title, own, bare), run_row(f"{case.name}: without state", bare, None)],
        run_targets(case.name, own, bare),
    )


def _kills(case: Case, folder: Path, given: argparse.Namespace) -> tuple[list[Row], list[Target]]:
    """Each machine of the case killed in turn, and then all at once."""
    say(f"{case.title}, kills: {case.population.lines}")
    try:
        killed = kill_all_in_turn(case, folder, given.seed, given.kills, say)
    except _FAILURES as error:
        say(f"{case.title}, kills: {error}")
        return _failed(f"{case.title}, kills")
    return kill_rows(case.name, killed), kill_targets(case.name, killed)


def _failed(what: str) -> tuple[list[Row], list[Target]]:
    return [{"case": f"{what} (failed)"}], [Target(f"{what}: runs that failed", 1.0, 0.0, at_most=True)]


if __name__ == "__main__":
    sys.exit(main())

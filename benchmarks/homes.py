"""Homes: training over home lines, with checkpoints, replicas and rounds, next to the same run without any of them.

Each case is a population of homes (named, or drawn from a seed out of published figures of home lines) and a model with
many parameters and little compute. `ravnest serve` and `ravnest join` run on the hosts of a WAN lab, with the default
settings. Each home pretends to be so much slower that all of them together leave half of this machine's cores idle.

Part `state`: a run as users start it, and one without checkpoints by time, rounds and replicas.

- `samples per second` is the rate from one minute after the first update on, `of predicted` relative to the plan.
- `of no state` is that rate relative to the run without state.
- `lost` counts providers, stages and clusters that were given up.
- `latest round` is the round that was latest, relative to its predicted duration.
- `stages gb h` and `state gb h` are the gigabytes that the machine with the largest such figure sends per hour, between
  stages and as state. State is what a machine sends beyond its activations and what goes with them, by comparison with
  the run without state; `--json` has every machine.
- `finish` is the time from the end of the data to the end of the run, with its last checkpoint.
- `idle` is the share of this machine's cores that was idle. Where it is near 0, other figures say little.

Part `kills`: every machine is killed in turn, at drawn moments, and comes back. `seconds` are from the kill until every
affected stage has made an update, `told seconds` what the run had told that a lost machine costs. Then all machines and
the coordinator are killed at once and started again with the same disks: `samples lost` is the training that was lost,
`lost seconds` the same in seconds.

Part `peers`, where every machine can hold the whole model: averaging as in DiLoCo over gloo, and hivemind's `Optimizer`
if `--hivemind` names an interpreter that has it, on the same hosts and lines but without NAT. `loss of all` is the
lowest loss that every contender has reached (the mean of 50 microbatches, each before its update).
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.homes_parts.cases import CASES, QUICK, Case
from benchmarks.homes_parts.kills import kill_all_in_turn
from benchmarks.homes_parts.ours import run
from benchmarks.homes_parts.peers import Curve, interpreters, missing_hivemind, run_peer
from benchmarks.homes_parts.reading import HomesRun
from benchmarks.homes_parts.rows import kill_rows, kill_targets, peer_rows, run_row, run_targets
from benchmarks.report import Row, Target, finish, say
from tests.wan import Lab

_PARTS = ("state", "kills", "peers")
_FAILURES = (RuntimeError, TimeoutError)


def main() -> int:
    given = _arguments()
    if reason := Lab.unavailable():
        say(f"the WAN lab is not available: {reason}")
        return 2
    if any("peers" in _parts_of(CASES[name], given) for name in given.only) and (
        reason := missing_hivemind(given.hivemind)
    ):
        say(f"hivemind is left out: {reason}")
        given.hivemind = None
    rows: list[Row] = []
    targets: list[Target] = []
    for name in given.only:
        case = CASES[name]
        if given.seconds is not None:
            case = replace(case, measure_seconds=given.seconds)
        with tempfile.TemporaryDirectory(prefix="ravnest-homes-") as temporary:
            measured = _Measured(case, Path(temporary) if given.keep is None else given.keep / name)
            parts = _parts_of(case, given)
            if "state" in parts:
                measured.state()
            if "kills" in parts:
                measured.kills(given.seed, given.kills)
            if "peers" in parts:
                measured.peers(given.hivemind)
        rows += measured.rows
        targets += measured.targets
    return finish("homes", given, rows, targets)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.homes", description="Training over home lines.")
    parser.add_argument("--quick", action="store_true", help="one small case, within two minutes")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the result to this file")
    parser.add_argument("--record", action="store_true", help="also write the table to benchmarks/history/")
    parser.add_argument("--only", choices=CASES, action="append", help="run only this case; may be repeated")
    parser.add_argument("--part", choices=_PARTS, action="append", help="measure this; may be repeated")
    parser.add_argument("--seconds", type=float, help="measured seconds of each run, instead of the case's own")
    parser.add_argument("--kills", type=int, help="machines to kill one after the other (default: each)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the moments of the kills (default: 1)")
    parser.add_argument("--hivemind", metavar="PYTHON", help="an interpreter that can import hivemind")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="new folder for the run directories and all output")
    given = parser.parse_args()
    given.only = given.only or ([QUICK.name] if given.quick else [name for name in CASES if name != QUICK.name])
    if given.keep is not None:
        if given.keep.exists():
            parser.error(f"{given.keep} exists: give a new folder to --keep")
        given.keep = given.keep.absolute()
    return given


def _parts_of(case: Case, given: argparse.Namespace) -> list[str]:
    """The parts to measure of a case: those asked for that it can have, or its own."""
    return [part for part in given.part or case.parts if part != "peers" or case.has_peers]


class _Measured:
    """All that is measured of one case. A failure becomes a row and a missed target, and the next part follows."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.rows: list[Row] = []
        self.targets: list[Target] = []
        self._case = case
        self._folder = folder
        self._runs: dict[bool, HomesRun] = {}
        """The runs that succeeded, by whether they had state."""

    def state(self) -> None:
        """The case as users start it, and without state."""
        name, title = self._case.name, self._case.title
        if self._run(with_state=True) and self._run(with_state=False):
            own, bare = self._runs[True], self._runs[False]
            self.rows += [run_row(title, own, bare), run_row(f"{name}: without state", bare, None)]
            self.targets += run_targets(name, own, bare)

    def kills(self, seed: int, machines: int | None) -> None:
        """Each machine, or this many, killed in turn, and then all at once."""
        case = self._case
        say(f"{case.title}, kills: {case.population.lines}")
        try:
            killed = kill_all_in_turn(case, self._folder / "kills", seed, machines, say)
        except _FAILURES as error:
            self._failed("kills", error)
            return
        self.rows += kill_rows(case.name, killed)
        self.targets += kill_targets(case.name, killed)

    def peers(self, hivemind: str | None) -> None:
        """Other ways to train the same model on these machines, next to our run."""
        if True not in self._runs and not self._run(with_state=True):
            return
        own = self._runs[True]
        curves = {"Ravnest": Curve(own.samples_per_second, len(own.rounds), own.losses)}
        for name, (module, interpreter) in interpreters(hivemind).items():
            say(f"{self._case.title}, {name}")
            try:
                curves[name] = run_peer(self._case, module, interpreter, self._folder / module)
            except _FAILURES as error:
                # A peer that fails misses no target of ours.
                say(f"{self._case.title}, {name}: {error}")
                self.rows.append({"case": f"{self._case.name}: {name} (failed)"})
        self.rows += peer_rows(self._case.name, curves)

    def _run(self, with_state: bool) -> bool:
        case, what = self._case, "with state" if with_state else "without state"
        say(f"{case.title}, {what}: {case.population.lines}")
        try:
            self._runs[with_state] = run(case, self._folder / what.replace(" ", "-"), with_state=with_state)
        except _FAILURES as error:
            self._failed(what, error)
            return False
        say(f"{case.title}, {what}: {self._runs[with_state]}")
        return True

    def _failed(self, what: str, error: Exception) -> None:
        say(f"{self._case.title}, {what}: {error}")
        self.rows.append({"case": f"{self._case.name}, {what} (failed)"})
        self.targets.append(Target(f"{self._case.name}, {what}: runs that failed", 1.0, 0.0, at_most=True))


if __name__ == "__main__":
    sys.exit(main())

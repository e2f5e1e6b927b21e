"""Recovery: how long a swarm takes to resume training after a machine is killed, and the throughput under many faults.

A small network (2 million parameters, AdamW) trains on 3 or 4 machines in the WAN lab, with 100 Mbit/s and a round trip
of 50 ms between any two, in real `ravnest serve` and `ravnest join` processes. SIGKILL ends the machine of the first, a
middle or the last stage. `whole` is the time from the kill to the first update of the restored stage in the run
directory (with reports every 0.2 s); `detect`, `decide`, `fetch` and `resume` are its parts, as the run reports them.
With a standby, another machine already has the stage's graph and recent state; without one, the model is re-partitioned
over the remaining machines.

`kept` is the rate of a swarm with spare machines during some minutes of faults of every kind (tests/chaos), relative to
its rate before the first or after the last fault, whichever is higher.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.recovery_parts.swarm import RecoverySwarm
from benchmarks.recovery_parts.watching import Recovery
from benchmarks.report import Row, Target, finish, say
from tests.wan import Lab

_STANDBY_TARGET_SECONDS = 5.0
_REFORM_TARGET_SECONDS = 15.0
_KEPT_TARGET = 0.95
_FAULTS_TARGET = 60
_PARTS = ("standby", "reform", "faults")
_ROLES = ("root", "stem", "leaf")
_FIGURES = ("whole", "detect", "decide", "fetch", "resume", "told")


def main() -> int:
    given = _arguments()
    if reason := Lab.unavailable():
        say(f"the WAN lab is not available: {reason}")
        return 2
    rows: list[Row] = []
    targets: list[Target] = []
    if "standby" in given.only:
        kills = _with_standby(() if given.quick else _ROLES * given.rounds)
        rows += kills.rows()
        targets += kills.targets("with a warm standby", "failover", _STANDBY_TARGET_SECONDS)
    if "reform" in given.only:
        orders = [("stem",)] if given.quick else [_ROLES, _ROLES[::-1], ("stem", "root", "leaf")][: given.rounds]
        kills = _without(orders)
        rows += kills.rows()
        targets += kills.targets("without a standby", "reformed", _REFORM_TARGET_SECONDS)
    if "faults" in given.only and given.minutes > 0:
        row, more = _faults(given.minutes, given.seed)
        rows.append(row)
        targets += more
    return finish("recovery", given, rows, targets)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery", description="How long a swarm takes to recover."
    )
    parser.add_argument("--quick", action="store_true", help="one kill each, within a minute; no long run")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the result to this file")
    parser.add_argument("--record", action="store_true", help="also write the table to benchmarks/history/")
    parser.add_argument("--only", choices=_PARTS, action="append", help="run only this part; may be repeated")
    parser.add_argument("--rounds", type=int, default=3, help="kills of each role, at most 3 (default: 3)")
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes of faults; 0 for none (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the faults")
    given = parser.parse_args()
    given.only = given.only or [part for part in _PARTS if part != "faults" or not given.quick]
    return given


def _with_standby(roles: Sequence[str]) -> "Kills":
    """Kills one machine after another in the same swarm; each comes back as a standby. Without roles, one kill."""
    kills = Kills("standby")
    # One standby for each stage, or for the stage whose machine will be killed.
    with kills.counted() as folder, RecoverySwarm(folder, stages=3, spares=3 if roles else 1) as swarm:
        swarm.wait_for_training()
        for number, role in enumerate(roles or (swarm.warm_role(),)):
            if number:
                swarm.rejoin()
            swarm.wait_for_warm(role)
            swarm.settle()
            kills.add(swarm.kill(role))
    return kills


def _without(orders: Sequence[Sequence[str]]) -> "Kills":
    """Kills one machine after another; the remaining ones can hold the whole model each time."""
    kills = Kills("without")
    for roles in orders:
        with kills.counted() as folder, RecoverySwarm(folder, stages=len(roles) + 1, spares=0) as swarm:
            swarm.wait_for_training()
            for role in roles:
                swarm.settle()
                kills.add(swarm.kill(role))
    return kills


class Kills:
    """Recoveries from several kills of one kind."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.mended: list[Recovery] = []
        self.broken = 0
        """Number of swarms that became unusable."""

    def add(self, recovery: Recovery) -> None:
        self.mended.append(recovery)
        say(f"{self.title}: {recovery}")

    @contextmanager
    def counted(self) -> Iterator[Path]:
        """A folder for a swarm. A swarm that fails is counted and reported, and another one follows."""
        try:
            with tempfile.TemporaryDirectory() as folder:
                yield Path(folder)
        except (RuntimeError, TimeoutError) as error:
            self.broken += 1
            say(f"{self.title}: {error}")

    def rows(self) -> list[Row]:
        rows: list[Row] = []
        for number, each in enumerate(self.mended, 1):
            figures = {name: getattr(each, name) for name in _FIGURES}
            more = {"way": each.way, "source": each.source, "replayed": each.replayed}
            rows.append({"case": f"{self.title}, {each.role} {number}", **figures, **more})
        if self.mended:
            medians = {}
            for name in _FIGURES:
                known = [value for each in self.mended if (value := getattr(each, name)) is not None]
                medians[name] = median(known) if known else None
            rows.append({"case": f"{self.title}, median of {len(self.mended)}", **medians})
        return rows

    def targets(self, title: str, way: str, seconds: float) -> list[Target]:
        """Targets for the time, and for the way of recovery that was measured."""
        others = sum(each.way != way for each in self.mended)
        targets = [
            Target(f"swarms {title} that broke", float(self.broken), 0.0, at_most=True),
            Target(f"kills {title} mended in another way", float(others), 0.0, at_most=True),
        ]
        if self.mended:
            middle = median(each.whole for each in self.mended)
            targets.insert(0, Target(f"median seconds {title}", middle, seconds, at_most=True))
        return targets


def _faults(minutes: float, seed: int, undisturbed_seconds: float = 90.0) -> tuple[Row, list[Target]]:
    """Faults of every kind, two per minute, in a swarm with spare machines and several clusters."""
    from tests.chaos.chaos import run_chaos

    report = run_chaos(
        minutes,
        seed,
        clusters=4,
        stages=2,
        standbys=3,
        every_seconds=28.0,
        undisturbed_seconds=undisturbed_seconds,
        measure_again=True,
        compare=False,
        tell=say,
    )
    for violation in report.violations:
        say(f"faults: {violation}")
    faults = sum(len(outcome.machines) for outcome in report.outcomes)
    row: Row = {
        "case": f"{minutes:g} minutes of faults",
        "faults": faults,
        "undisturbed_per_second": report.undisturbed_rate,
        "disturbed_per_second": report.disturbed_rate,
        "kept": report.kept_rate,
        "violations": report.violations,
    }
    wanted = _FAULTS_TARGET * min(1.0, minutes / 30)
    return row, [
        Target(f"share of the rate kept over {minutes:g} minutes", report.kept_rate, _KEPT_TARGET),
        Target("faults meanwhile", float(faults), wanted),
        Target("promises broken meanwhile", float(len(report.violations)), 0.0, at_most=True),
    ]


if __name__ == "__main__":
    sys.exit(main())

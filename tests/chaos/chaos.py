"""Chaos run: trains a swarm under a schedule of faults, checks the promises, and compares with a run without faults."""

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from benchmarks.homes_parts.population import Population
from tests.chaos.injector import Injector
from tests.chaos.observer import RunObserver
from tests.chaos.report import Outcome, Report
from tests.chaos.schedule import ANY_CLUSTERS, BETWEEN_CLUSTERS, Case, for_roles, schedule
from tests.chaos.swarm import ROOT, BrokenError, ChaosSwarm
from tests.e2e.command import Running

MAX_LOSS_APART: Final = 0.05
END_SECONDS: Final = 120.0
ALONE_SECONDS: Final = 900.0

Tell = Callable[[str], None]


def cases_for(clusters: int, stages: int) -> tuple[Case, ...]:
    """All cases that are possible in a swarm of this shape."""
    roles = ["root", "leaf", "standby", "coordinator", "stranger", *(["stem"] if stages > 2 else [])]
    return for_roles((*ANY_CLUSTERS, *(BETWEEN_CLUSTERS if clusters > 1 else ())), roles)


def run_chaos(
    minutes: float | None,
    seed: int,
    *,
    clusters: int = 1,
    stages: int = 3,
    standbys: int = 2,
    lines: Population | None = None,
    among: Sequence[Case] | None = None,
    every_seconds: float = 0.0,
    undisturbed_seconds: float = 20.0,
    measure_again: bool = False,
    compare: bool = True,
    keep: Path | None = None,
    tell: Tell = print,
) -> Report:
    """Trains in the lab under the schedule of the seed: for this number of minutes, or None: each case once.

    `lines` are the home lines of the machines (None: equal ones), `among` the cases (None: all possible ones);
    `every_seconds` is the minimum time between two cases. The rate without faults is measured before the first case,
    and with `measure_again` also after the last: the higher one counts. `keep` is a new folder for all files of the
    machines. Broken promises are in the report, and not raised.
    """
    among = cases_for(clusters, stages) if among is None else among
    with tempfile.TemporaryDirectory(prefix="ravnest-chaos-") as name:
        folder = Path(name)
        rounds = 1 if minutes is None else 1 + int(minutes * 60 / 5 / len(among))
        epochs = 1 + rounds * sum(case.during == "evaluation" for case in among)
        with ChaosSwarm(
            folder, clusters=clusters, stages=stages, standbys=standbys, epochs=epochs, lines=lines
        ) as swarm:
            report = _Run(swarm, minutes, seed, among, every_seconds, tell).report(
                undisturbed_seconds, compare, measure_again
            )
        if keep is not None:
            shutil.copytree(folder, keep)
        return report


class _Run:
    def __init__(
        self,
        swarm: ChaosSwarm,
        minutes: float | None,
        seed: int,
        among: Sequence[Case],
        every_seconds: float,
        tell: Tell,
    ) -> None:
        self._swarm = swarm
        self._minutes = minutes
        self._seed = seed
        self._among = among
        self._every_seconds = every_seconds
        self._tell = tell
        self._outcomes: list[Outcome] = []
        self._ends: list[str] = []
        self._undisturbed = self._disturbed = 0.0
        self._losses: dict[int, tuple[float, float]] = {}

    def report(self, undisturbed_seconds: float, compare: bool, again: bool) -> Report:
        swarm = self._swarm
        try:
            swarm.wait_for_training()
            self._undisturbed = self._undisturbed_rate(undisturbed_seconds)
            self._tell(f"seed {self._seed}: {self._undisturbed:.1f} microbatches/s without faults")
            self._disturbed = self._rate(self._inject_all)
            if again:
                # If this machine was busy with other work at the beginning, faults would seem to cost less.
                after = self._undisturbed_rate(undisturbed_seconds)
                self._tell(f"{after:.1f} microbatches/s after the last fault")
                self._undisturbed = max(self._undisturbed, after)
            swarm.end_run()
            self._check_end()
            if compare:
                self._compare()
        except BrokenError as broken:
            self._ends.append(str(broken))
        ledger = swarm.watch.summary().get("ledger", {})
        return Report(
            seed=self._seed,
            outcomes=tuple(self._outcomes),
            undisturbed_rate=self._undisturbed,
            disturbed_rate=self._disturbed,
            ledger=ledger,
            losses=self._losses,
            ends=tuple(self._ends),
        )

    def _undisturbed_rate(self, seconds: float) -> float:
        """Microbatches per second without faults; from the curve, which is more recent than the summary."""
        mark = self._swarm.watch.mark()
        time.sleep(seconds)
        return len(self._swarm.watch.steps(mark)) / seconds

    def _rate(self, work: Callable[[], None]) -> float:
        """Microbatches per second while `work` runs; a microbatch that was fed several times counts once."""
        before = self._swarm.watch.mark()
        work()
        after = self._swarm.watch.mark()
        return (after.completed - before.completed) / (after.at - before.at)

    def _inject_all(self) -> None:
        injector, began = Injector(self._swarm), time.monotonic()
        for planned in schedule(self._seed, self._among):
            over = self._minutes is not None and time.monotonic() - began > 60 * self._minutes
            if over or (self._minutes is None and planned.number > len(self._among)):
                injector.recover()
                return
            if injector.injected_at is not None:
                time.sleep(max(0.0, injector.injected_at + self._every_seconds - time.monotonic()))
            try:
                outcome = injector.run(planned)
            except BrokenError as broken:
                raise BrokenError(f"{planned} (seed {self._seed}): {broken}") from None
            self._outcomes.append(outcome)
            self._tell(_outcome_line(outcome))

    def _check_end(self) -> None:
        swarm = self._swarm
        code = swarm.wait_for_end(END_SECONDS)
        if code is None:
            raise BrokenError(f"the run has not ended {END_SECONDS:.0f} s after its last microbatch:\n{swarm.output()}")
        summary = swarm.watch.summary()
        if code != 0 or summary["status"] != "finished":
            raise BrokenError(f"the run has {summary['status']}, with code {code}:\n{swarm.output()}")
        ledger = summary["ledger"]
        if ledger["fed"] != ledger["completed"] or ledger["lost"] or ledger["applied_twice"]:
            self._ends.append(f"the ledger does not add up: {ledger}")
        if applied := [event for event in swarm.watch.events() if event["kind"] == "applied_twice"]:
            self._ends.append(f"{len(applied)} microbatches were applied twice: {applied[0]['reason']}")
        if swarm.clusters > 1:
            self._check_agreement()
        for fault in summary["faults"]:
            if fault["recovered_seconds"] is None:
                self._ends.append(f"the summary has no recovery time of {fault}")

    def _check_agreement(self) -> None:
        """The last round included all clusters, and was committed, which requires equal results."""
        rounds = [event for event in self._swarm.watch.events() if event["kind"] in ("round", "round_skipped")]
        last = rounds[-1] if rounds else None
        if last is None or last["kind"] != "round" or last["clusters"] != self._swarm.clusters:
            self._ends.append(f"the clusters do not agree at the end: {last}")

    def _compare(self) -> None:
        """Trains on the same data without faults, and compares the losses of all evaluations."""
        swarm, folder = self._swarm, self._swarm.folder / "undisturbed"
        folder.mkdir()
        for path in (swarm.folder / "job.py", swarm.folder / "form", *swarm.folder.glob("epoch-*.length")):
            shutil.copy(path, folder / path.name)
        size = ("--providers", str(swarm.clusters * swarm.stages), "--clusters", str(swarm.clusters))
        words = ("train", "job.py", *size, "--run", "run", "--no-display")
        began = time.monotonic()
        with Running(*words, folder=folder, warm=True, PYTHONPATH=str(ROOT)) as alone:
            alone.patience_seconds = ALONE_SECONDS
            output = alone.to_the_end()
        if alone.process.returncode != 0:
            raise BrokenError(f"the run without faults ended with code {alone.process.returncode}:\n{output}")
        self._tell(f"the same run without faults took {time.monotonic() - began:.0f} s")
        without, ours = RunObserver(folder / "run").evaluations(), swarm.watch.evaluations()
        for samples, loss in without.items():
            if samples not in ours:
                self._ends.append(f"there was no evaluation after {samples} samples, as without faults")
                continue
            self._losses[samples] = ours[samples], loss
            if not abs(ours[samples] - loss) <= MAX_LOSS_APART:
                self._ends.append(
                    f"the loss after {samples} samples is {ours[samples]:.4f}, and without faults {loss:.4f}"
                )


def _outcome_line(outcome: Outcome) -> str:
    times = [
        f"{what} {seconds:.1f} s"
        for what, seconds in (
            ("seen after", outcome.seen_seconds),
            ("continued after", outcome.continued_seconds),
            ("back after", outcome.back_seconds),
        )
        if seconds is not None
    ]
    bad = [f"VIOLATION: {each}" for each in outcome.violations]
    return f"{outcome.number}. {outcome.case} [{' '.join(outcome.machines)}]: {', '.join([*times, *bad])}"

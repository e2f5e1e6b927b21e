"""Convergence: whether several clusters learn as well as one, by the loss on held-out data after the same samples.

Clusters of two providers train the tasks of benchmarks/learning.py from three seeds: one, two and four clusters; with
the plain mean in the background; with the plain mean in blocking rounds, in float32 and int8; and with Nesterov's step,
also with DiLoCo's values. Providers simulate machines that are several times slower than this one, so that its cores
are enough for all of them: two clusters then train twice as fast as one, as on separate machines, and times can be
compared.

The loss of a run is the mean of its last four evaluations, because a single one depends on the last batch. Four
clusters apply a quarter of the updates that one cluster applies to the same samples, each from four times the data. A
short run that is limited by the number of updates therefore ends with a higher loss, so there are two measures:

- after the same samples: the difference between their mean loss over the seeds and one cluster's, minus two standard
  errors of that difference;
- after the same seconds: the difference to one cluster's loss at the time when the several clusters had finished,
  which is the mean of its four evaluations up to the first one after that time.

The target is at most 0.01 for the smaller of the two, with the default settings; the table has the other settings for
comparison. A second target is at most 0.01 for the mean difference, over seeds and cluster counts, between int8 and
float32 in blocking rounds: in the background a slower codec would also mean fewer rounds. The codecs that a ring gets
by itself are also compared in one process (benchmarks/coded_rounds.py), where nothing depends on time.
"""

import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import ravnest
from benchmarks.coded_rounds import coded_rounds
from benchmarks.learning import TASKS, Task
from benchmarks.report import Row, Target, arguments, finish, say
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.monitor.events import read_events
from ravnest.monitor.metrics import read_metrics

_STAGES: Final = 2
_SLOWER: Final = 8.0
"""Factor by which providers are slower than this machine, divided by its number of cores."""
_DILOCO: Final = (0.7, 0.9)
"""Learning rate and momentum of the outer step in DiLoCo (arXiv 2311.08105)."""
_UPDATES_BETWEEN_ROUNDS: Final = 10
"""Updates of each cluster between two rounds."""
_EVALUATIONS: Final = 4
_NOISE: Final = 0.01


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to train several clusters."""

    clusters: int
    outer: str = ravnest.Averaging().outer
    codec: str = "float32"
    rate: float | None = None
    momentum: float | None = None
    """Momentum of the outer step; None for its default."""
    blocking: bool = False
    """Whether training waits for rounds, so that timing cannot influence the result."""

    @property
    def title(self) -> str:
        if self.clusters == 1:
            return "1 cluster"
        outer = self.outer if self.rate is None else f"{self.outer} {self.rate:g}/{self.momentum:g}"
        return f"{self.clusters} clusters, {outer}, {self.codec}{', waiting for rounds' if self.blocking else ''}"


ONE: Final = Setting(clusters=1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: its evaluations as (seconds since the first update, loss), and its speed."""

    curve: tuple[tuple[float, float], ...]
    samples_per_second: float
    rounds: int

    @property
    def seconds(self) -> float:
        return self.curve[-1][0]

    @property
    def loss(self) -> float:
        return self.loss_after(self.seconds)

    def loss_after(self, seconds: float) -> float:
        """The mean of the last four evaluations up to and including the first one after that time; if there is none,
        of the last four of the run."""
        upto = next((number for number, (at, _) in enumerate(self.curve, 1) if at >= seconds), len(self.curve))
        return statistics.mean(loss for _, loss in self.curve[max(0, upto - _EVALUATIONS) : upto])


Outcomes = dict[Setting, list[Outcome]]
"""A list for each setting, in the order of the seeds."""


def main() -> int:
    names = ("digits", "gpt")
    given = arguments("convergence", "Whether several clusters learn as well as one, at equal samples.", names)
    chosen = [task for name, task in zip(names, TASKS, strict=True) if name in given.only]
    tasks, seeds = (chosen[:1], 2) if given.quick else (chosen, 3)
    settings = (ONE, *_several(2)[:3]) if given.quick else (ONE, *_several(2), *_several(4))
    rows: list[Row] = []
    targets: list[Target] = []
    providers = _STAGES * max(setting.clusters for setting in settings)
    slower = max(1.0, _SLOWER / (os.cpu_count() or 1))
    with tempfile.TemporaryDirectory() as folder, EmbeddedSwarm(providers, slower=(slower,)) as swarm:
        for task in tasks:
            outcomes: Outcomes = {setting: [] for setting in settings}
            epochs = task.quick_epochs if given.quick else task.epochs
            for seed in range(1, seeds + 1):
                # All settings of a seed run before the next seed, so that a busy machine slows them all.
                for number, setting in enumerate(outcomes):
                    run = Path(folder, f"{tasks.index(task)}-{seed}-{number}")
                    outcomes[setting].append(_train(swarm, task, setting, seed, epochs, run))
            rows += _rows(task, outcomes)
            targets += _targets(task, outcomes)
    coded, aims = coded_rounds(tasks, seeds, (2,) if given.quick else (2, 4), given.quick)
    return finish("convergence", given, [*rows, *coded], [*targets, *aims])


def _several(clusters: int) -> list[Setting]:
    return [
        Setting(clusters),
        Setting(clusters, blocking=True),
        Setting(clusters, codec="int8", blocking=True),
        Setting(clusters, "nesterov"),
        Setting(clusters, "nesterov", rate=_DILOCO[0], momentum=_DILOCO[1]),
    ]


def _train(swarm: EmbeddedSwarm, task: Task, setting: Setting, seed: int, epochs: int, run: Path) -> Outcome:
    every = _UPDATES_BETWEEN_ROUNDS * task.batch_size * setting.clusters
    averaging = ravnest.Averaging(
        every=every,
        outer=setting.outer,
        codec=setting.codec,
        outer_rate=setting.rate,
        outer_momentum=setting.momentum,
        blocking=setting.blocking,
    )
    job = replace(task.job(seed, epochs), averaging=averaging)
    providers = _STAGES * setting.clusters
    result = swarm.train(job, providers=providers, clusters=setting.clusters, run=run, display=False)
    summary = result.summary
    begin = next(event["at"] for event in read_events(run / "events.jsonl") if event["kind"] == "first_update")
    evaluations = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "eval"]
    curve = tuple((line["at"] - begin, float(line["loss"])) for line in evaluations)
    outcome = Outcome(curve, summary.samples_per_second, summary.averaging.rounds)
    say(
        f"{task.title}, {setting.title}, seed {seed}: loss {outcome.loss:.4f} after {summary.samples:,} samples "
        f"in {outcome.seconds:.1f} s, {outcome.rounds} rounds"
    )
    return outcome


def _rows(task: Task, outcomes: Outcomes) -> Iterator[Row]:
    one = outcomes[ONE]
    for setting, runs in outcomes.items():
        row: dict[str, object] = {
            "case": f"{task.title}, {setting.title}",
            "loss": statistics.mean(run.loss for run in runs),
            "spread": statistics.stdev(run.loss for run in runs),
            "seconds": statistics.mean(run.seconds for run in runs),
            "samples_per_second": statistics.mean(run.samples_per_second for run in runs),
            "rounds": round(statistics.mean(run.rounds for run in runs)),
        }
        if setting.clusters > 1:
            row |= {
                "above_one_cluster_after_same_samples": above_after_samples(runs, one),
                "above_one_cluster_after_same_seconds": above_after_seconds(runs, one),
            }
        yield row


def _targets(task: Task, outcomes: Outcomes) -> Iterator[Target]:
    one = outcomes[ONE]
    for setting, runs in outcomes.items():
        if setting.clusters > 1 and setting == Setting(setting.clusters):
            by_samples = above_after_samples(runs, one) - 2 * standard_error(runs, one)
            value = min(by_samples, above_after_seconds(runs, one))
            name = f"{task.title}, {setting.title}: loss above one cluster's"
            yield Target(name, value, _NOISE, at_most=True)
    yield Target(f"{task.title}: loss with int8 above float32", int8_above_float32(outcomes), _NOISE, at_most=True)


def above_after_samples(runs: Sequence[Outcome], one: Sequence[Outcome]) -> float:
    return statistics.mean(run.loss for run in runs) - statistics.mean(run.loss for run in one)


def above_after_seconds(runs: Sequence[Outcome], one: Sequence[Outcome]) -> float:
    return statistics.mean(run.loss - other.loss_after(run.seconds) for run, other in zip(runs, one, strict=True))


def standard_error(runs: Sequence[Outcome], one: Sequence[Outcome]) -> float:
    """Standard error of the difference between the two means."""
    return math.sqrt(sum(statistics.variance(run.loss for run in group) / len(group) for group in (runs, one)))


def int8_above_float32(outcomes: Outcomes) -> float:
    return statistics.mean(
        run.loss - exact.loss
        for setting, runs in outcomes.items()
        if setting.codec == "int8"
        for run, exact in zip(runs, outcomes[replace(setting, codec="float32")], strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())

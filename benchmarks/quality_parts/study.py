"""Trains ways in all processes there are: every learning rate from one seed, then the best one from the others."""

import math
import multiprocessing
import statistics
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass

from benchmarks.quality_parts.tasks import TASKS
from benchmarks.quality_parts.trial import Outcome, Trial, Way, run_trial
from benchmarks.report import say


@dataclass(frozen=True, slots=True)
class Found:
    """What a way came to with the learning rate that is best for it: an outcome for each seed."""

    way: Way
    rate: float
    outcomes: tuple[Outcome, ...]
    tried: tuple[tuple[float, float], ...]
    """All rates, with the loss from the first seed."""

    @property
    def loss(self) -> float:
        return statistics.mean(outcome.loss for outcome in self.outcomes)

    @property
    def spread(self) -> float:
        """Standard deviation between seeds."""
        return statistics.stdev(outcome.loss for outcome in self.outcomes) if len(self.outcomes) > 1 else 0.0

    @property
    def is_at_the_edge(self) -> bool:
        """Whether a rate beyond those tried might be better."""
        rates = sorted(rate for rate, _ in self.tried)
        return self.rate in (rates[0], rates[-1])

    def samples_to(self, loss: float) -> float | None:
        """Samples until the mean curve of all seeds first is at most so high, between two evaluations in proportion;
        None: never."""
        curves = [outcome.curve for outcome in self.outcomes]
        points: list[tuple[float, float]] = [
            (at[0][0], statistics.mean(loss for _, loss in at)) for at in zip(*curves, strict=False)
        ]
        before: tuple[float, float] | None = None
        for samples, here in points:
            if here <= loss:
                if before is None or before[1] <= here:
                    return samples
                return before[0] + (samples - before[0]) * (before[1] - loss) / (before[1] - here)
            before = (samples, here)
        return None


def study(
    ways: Sequence[Way], seeds: int, epochs: dict[str, int], workers: int, rates: int | None = None
) -> dict[Way, Found]:
    """Trains them all; `rates` limits how many are tried, those in the middle first."""
    found: dict[Way, Found] = {}
    first: dict[Way, dict[float, Outcome]] = {way: {} for way in ways}
    others: dict[Way, list[tuple[int, Outcome]]] = {way: [] for way in ways}
    best: dict[Way, float] = {}
    wanted = {way: _middle(TASKS[way.task].rates, rates) for way in ways}
    total, done = sum(len(each) + seeds - 1 for each in wanted.values()), 0
    # Not forked: torch's threads do not survive it.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[Outcome], Trial] = {}

        def submit(trials: Iterable[Trial]) -> None:
            running.update({pool.submit(run_trial, trial): trial for trial in trials})

        # Those with more stages take longest, and must not be left to the end.
        for way in sorted(ways, key=lambda way: (way.task != "gpt", -way.stages)):
            submit(Trial(way, rate, 1, epochs[way.task]) for rate in wanted[way])
        while running:
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                trial, outcome = running.pop(future), future.result()
                done, way = done + 1, trial.way
                if trial.seed == 1:
                    first[way][trial.rate] = outcome
                else:
                    others[way].append((trial.seed, outcome))
                if trial.seed == 1 and len(first[way]) == len(wanted[way]):
                    best[way] = min(first[way], key=lambda rate: first[way][rate].loss)
                    submit(Trial(way, best[way], seed, epochs[way.task]) for seed in range(2, seeds + 1))
                if way in best and len(others[way]) == seeds - 1:
                    found[way] = _found(way, best[way], first[way], others[way])
                    say(f"{done}/{total} {way.title}: {found[way].loss:.4f} at a rate of {best[way]:g}")
    return {way: found[way] for way in ways}


def _found(way: Way, rate: float, first: dict[float, Outcome], others: list[tuple[int, Outcome]]) -> Found:
    outcomes = (first[rate], *(outcome for _, outcome in sorted(others, key=lambda each: each[0])))
    return Found(way, rate, outcomes, tuple(sorted((tried, outcome.loss) for tried, outcome in first.items())))


def _middle(rates: Sequence[float], count: int | None) -> tuple[float, ...]:
    if count is None or count >= len(rates):
        return tuple(rates)
    start = math.ceil((len(rates) - count) / 2)
    return tuple(rates[start : start + count])


def rows(found: dict[Way, Found]) -> Iterator[dict[str, object]]:
    """A row for each way, with its distance to synchronous training of the same task."""
    for way, each in found.items():
        exact = found[Way(way.task)]
        row: dict[str, object] = {
            "case": way.title,
            # JSON knows no infinity; a way that failed has no loss.
            "loss": each.loss if math.isfinite(each.loss) else None,
            "above_synchronous": each.loss - exact.loss if math.isfinite(each.loss) and way != exact.way else None,
            "spread": each.spread if math.isfinite(each.loss) else None,
            "rate": each.rate,
            "rate_at_edge": each.is_at_the_edge,
            "in_flight": way.in_flight,
            "root_staleness": statistics.mean(outcome.staleness for outcome in each.outcomes),
            "tried": {f"{rate:g}": loss if math.isfinite(loss) else None for rate, loss in each.tried},
            "curve": _mean_curve(each),
        }
        yield row


def _mean_curve(found: Found) -> list[tuple[int, float]]:
    curves = zip(*(outcome.curve for outcome in found.outcomes), strict=False)
    return [(at[0][0], round(statistics.mean(loss for _, loss in at), 4)) for at in curves]

"""Study of several ways of training: every learning rate with one seed, then the two best rates with all seeds.

One seed is not enough to compare two rates, so the mean over all seeds decides. Trials run in parallel processes.
"""

import math
import multiprocessing
import statistics
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Final

from benchmarks.quality_parts.tasks import TASKS
from benchmarks.quality_parts.trial import Outcome, Trial, Way, run_trial
from benchmarks.report import say

_FINALISTS: Final = 2
"""Number of learning rates that are tried with every seed."""


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a way with its best learning rate: an outcome for each seed."""

    way: Way
    rate: float
    outcomes: tuple[Outcome, ...]
    tried: tuple[tuple[float, float], ...]
    """All rates, with their loss for the first seed."""

    @property
    def loss(self) -> float:
        return statistics.mean(outcome.loss for outcome in self.outcomes)

    @property
    def spread(self) -> float:
        """Standard deviation between seeds."""
        return statistics.stdev(outcome.loss for outcome in self.outcomes) if len(self.outcomes) > 1 else 0.0

    @property
    def is_at_the_edge(self) -> bool:
        """Whether a rate outside of those tried might be better."""
        rates = sorted(rate for rate, _ in self.tried)
        return self.rate in (rates[0], rates[-1])

    def samples_to(self, loss: float) -> float | None:
        """Samples until the mean curve of all seeds first reaches this loss, interpolated between two evaluations;
        None if it never does."""
        return self._to(loss, [samples for samples, _ in self.outcomes[0].curve])

    def full_samples_to(self, loss: float) -> float | None:
        """The samples that a pipeline without idle stages would train on in the same virtual time."""
        return self._to(loss, self.outcomes[0].full)

    def _to(self, loss: float, places: Sequence[float]) -> float | None:
        curves = [outcome.curve for outcome in self.outcomes]
        means = [statistics.mean(loss for _, loss in at) for at in zip(*curves, strict=False)]
        points: list[tuple[float, float]] = list(zip(places, means, strict=False))
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
    """Train all ways; `rates` limits the number of learning rates, starting with those in the middle."""
    found: dict[Way, Found] = {}
    outcomes: dict[Way, dict[float, dict[int, Outcome]]] = {}
    for way in ways:
        outcomes[way] = {rate: {} for rate in _middle(TASKS[way.task].rates, rates)}
    total = sum(len(each) + min(len(each), _FINALISTS) * (seeds - 1) for each in outcomes.values())
    done = 0
    # Not forked, because torch's threads do not survive a fork.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[Outcome], Trial] = {}

        def submit(trials: Iterable[Trial]) -> None:
            running.update({pool.submit(run_trial, trial): trial for trial in trials})

        # Ways with more stages take longer, so they start first.
        for way in sorted(ways, key=lambda way: (way.task != "gpt", -way.stages)):
            submit(Trial(way, rate, 1, epochs[way.task]) for rate in outcomes[way])
        while running:
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                trial, outcome = running.pop(future), future.result()
                done, way = done + 1, trial.way
                outcomes[way][trial.rate][trial.seed] = outcome
                finalists = _finalists(outcomes[way])
                if trial.seed == 1:
                    submit(Trial(way, rate, n, epochs[way.task]) for rate in finalists for n in range(2, seeds + 1))
                if finalists and all(len(outcomes[way][rate]) == seeds for rate in finalists):
                    found[way] = _found(way, outcomes[way], finalists)
                    say(f"{done}/{total} {way.title}: {found[way].loss:.4f} at a rate of {found[way].rate:g}")
    return {way: found[way] for way in ways}


def _finalists(tried: dict[float, dict[int, Outcome]]) -> list[float]:
    """The best rates with the first seed; empty until all of them were tried."""
    if not all(1 in seeds for seeds in tried.values()):
        return []
    return sorted(tried, key=lambda rate: tried[rate][1].loss)[:_FINALISTS]


def _found(way: Way, tried: dict[float, dict[int, Outcome]], finalists: Sequence[float]) -> Found:
    rate = min(finalists, key=lambda rate: statistics.mean(outcome.loss for outcome in tried[rate].values()))
    outcomes = tuple(outcome for _, outcome in sorted(tried[rate].items()))
    return Found(way, rate, outcomes, tuple(sorted((each, seeds[1].loss) for each, seeds in tried.items())))


def _middle(rates: Sequence[float], count: int | None) -> tuple[float, ...]:
    if count is None or count >= len(rates):
        return tuple(rates)
    start = math.ceil((len(rates) - count) / 2)
    return tuple(rates[start : start + count])


def rows(found: dict[Way, Found]) -> Iterator[dict[str, object]]:
    """A row for each way, with its difference to synchronous training of the same task."""
    for way, each in found.items():
        exact = found[Way(way.task)]
        row: dict[str, object] = {
            "case": way.title,
            # JSON has no infinity, so a way that failed has no loss.
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

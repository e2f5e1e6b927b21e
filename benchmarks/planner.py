"""Benchmark of the planner: quality of its plans against brute force, the paper's rule and an upper bound, and its
time.

Brute force tries all partitions, all orders and the best cuts of each. `benchmarks.planning.paper_rule` restates the
paper's rule; our cost model judges its plans. `gain` is our predicted rate divided by theirs. Plans that do not fit
into the memory, or only with part of their clusters, are counted as `unfit` and `partly unfit`; `gain if it fits` is
the median of the others. A case "20 of 6" is 20 instances of 6 providers; `of bound` is the share of an upper bound
that no plan reaches in full. Times are processor time of one thread, which other load on the machine affects less.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.planning.bound import upper_bound
from benchmarks.planning.brute_force import best_listed_score, best_score
from benchmarks.planning.instances import random_instance
from benchmarks.planning.paper_rule import PaperPlan, paper_plan
from benchmarks.planning.promise import SET_UPS, measured
from benchmarks.report import Row, Target, arguments, finish, say
from ravnest.errors import PlanError
from ravnest.planner.search.cuts import best_cuts
from ravnest.planner.search.objective import score
from ravnest.planner.search.search import form
from tests.wan import Lab

_COUNTS = {2: 10, 3: 22, 4: 28, 5: 28, 6: 20, 7: 10}
"""Number of random instances by number of providers."""
_QUICK_COUNTS = {2: 4, 3: 10, 4: 12, 5: 8}
_SCALES = {100: 2.0, 1000: 10.0, 10_000: 120.0}
"""Maximum seconds by number of providers."""
_WORST_OFF = 0.15
_MEAN_OFF = 0.10


def main() -> int:
    given = arguments("planner", "How good the planner's plans are, and how long it takes.")
    rows: list[Row] = []
    targets: list[Target] = []
    for part in (_small, _cuts, _large, _promise):
        more_rows, more_targets = part(given.quick)
        rows += more_rows
        targets += more_targets
    return finish("planner", given, rows, targets)


@dataclass(frozen=True, slots=True)
class _Compared:
    """One instance: our score, the best possible one, and the plan of the paper's rule."""

    ours: float
    best: float
    paper: PaperPlan

    @property
    def share(self) -> float:
        """Share of the best score; above 1 if other cuts, which brute force does not try, make averaging shorter."""
        return self.ours / self.best


def _small(quick: bool) -> tuple[list[Row], list[Target]]:
    """Up to 7 providers, against brute force and the paper's rule."""
    rows: list[Row] = []
    everything: list[_Compared] = []
    for count, instances in (_QUICK_COUNTS if quick else _COUNTS).items():
        found: list[_Compared] = []
        for seed in itertools.count():
            if len(found) == instances:
                break
            compared = _compare(seed, count)
            if compared is not None:
                found.append(compared)
        everything += found
        rows.append(_small_row(f"{instances} of {count}", found))
        say(
            f"{count} providers: mean {rows[-1]['mean_of_best']:.4f} of the best, worst {rows[-1]['worst_of_best']:.4f}"
        )
    rows.append(_small_row(f"all {len(everything)}", everything))
    shares = [min(1.0, one.share) for one in everything]
    return rows, [
        Target("plans of up to 7 providers: mean share of the best", statistics.mean(shares), 0.99),
        Target("plans of up to 7 providers: worst share of the best", min(shares), 0.95),
    ]


def _compare(seed: int, count: int) -> _Compared | None:
    """None if the model fits nowhere; the planner must say so too."""
    instance = random_instance(seed, count)
    best = best_score(instance)
    try:
        ours = form(instance.model, instance.goal, instance.network, instance.providers).score
    except PlanError:
        assert not best, f"The planner finds no plan for {instance.name}, brute force does."
        return None
    return _Compared(ours, best, paper_plan(instance))


def _small_row(case: str, found: Sequence[_Compared]) -> dict[str, object]:
    shares = [min(1.0, one.share) for one in found]
    gains = [one.ours / one.paper.score for one in found if one.paper.score]
    fitting = [one.ours / one.paper.score for one in found if one.paper.fitting == one.paper.clusters]
    row: dict[str, object] = {
        "case": case,
        "mean_of_best": statistics.mean(shares),
        "worst_of_best": min(shares),
        "gain_median": statistics.median(gains) if gains else None,
        "gain_least": min(gains, default=None),
        "gain_most": max(gains, default=None),
        "gain_if_it_fits": statistics.median(fitting) if fitting else None,
        "unfit": sum(not one.paper.score for one in found),
        "partly_unfit": sum(0 < one.paper.fitting < one.paper.clusters for one in found),
    }
    return row


def _cuts(quick: bool) -> tuple[list[Row], list[Target]]:
    """The cuts for a given order, against all cuts with all numbers in flight."""
    shares = []
    for seed in range(20 if quick else 100):
        count = 2 + seed % 3
        instance = random_instance(seed, count, places=9)
        best = best_listed_score(instance.model, instance.goal, instance.network, instance.providers)
        cluster = best_cuts(instance.model, instance.goal, instance.network, instance.providers)
        assert (cluster is None) == (best == 0.0)
        if cluster is not None:
            shares.append(score(instance.goal, cluster) / best)
    say(f"cuts: worst {min(shares):.6f} of the best of all, in {len(shares)} orders")
    row = {
        "case": f"cuts of {len(shares)}",
        "mean_of_best": statistics.mean(shares),
        "worst_of_best": min(shares),
    }
    return [row], [Target("cuts for a given order: worst share of the best", min(shares), 1 - 1e-9)]


def _large(quick: bool) -> tuple[list[Row], list[Target]]:
    """Many providers: the time on one core, and the share of the upper bound."""
    rows: list[Row] = []
    targets: list[Target] = []
    for count, limit in _SCALES.items():
        if quick and count > 1000:
            continue
        slowest = 0.0
        for seed in range(1 if count > 1000 or quick else 3):
            instance = random_instance(seed, count, places=33)
            started = time.process_time()
            plan = form(instance.model, instance.goal, instance.network, instance.providers)
            seconds = time.process_time() - started
            slowest = max(slowest, seconds)
            bound = upper_bound(instance.model, instance.goal, instance.network, instance.providers)
            rows.append(
                {
                    "case": f"{count:,}, seed {seed}",
                    "seconds": seconds,
                    "clusters": len(plan.clusters),
                    "of_bound": plan.score / bound,
                }
            )
            say(f"{instance.name}: {seconds:.1f} s, {plan.score / bound:.2f} of the upper bound")
        targets.append(Target(f"{count:,} providers: processor seconds", slowest, limit, at_most=True))
    return rows, targets


def _promise(quick: bool) -> tuple[list[Row], list[Target]]:
    """Predicted rates of runs against measured ones, over real lines."""
    if reason := "--quick" if quick else Lab.unavailable():
        say(f"the promise is left out: {reason}")
        return [], []
    rows = [measured(set_up) for set_up in SET_UPS]
    off = [abs(float(row["off"])) for row in rows]  # type: ignore[arg-type]
    return rows, [
        Target("the promise: off by, at the worst of the set-ups", max(off), _WORST_OFF, at_most=True),
        Target("the promise: off by, on average", statistics.mean(off), _MEAN_OFF, at_most=True),
    ]


if __name__ == "__main__":
    sys.exit(main())

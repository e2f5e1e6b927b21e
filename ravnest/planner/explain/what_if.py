"""Gain of another number of clusters, one more machine, a faster line or more memory for a plan.

Each question is answered with small changes of the plan, which need only a few cuts. If there is a search, and the
providers are few enough, the best plan that it finds is compared too, and the better of the two counts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ravnest.errors import PlanError
from ravnest.planner.cluster import Cluster, StageCost
from ravnest.planner.explain.nearby import Case, figures, improvements
from ravnest.planner.problem import Goal, Line, Network, Provider
from ravnest.planner.proposal import Proposal, proposal_of

Search = Callable[[Goal, Network, Sequence[Provider]], Proposal]
"""The best plan for these providers; PlanError if there is none."""

SEARCHED: Final = 200
"""Number of providers up to which new plans are searched for."""

LOOKED_AT: Final = 4
"""Number of clusters that a change is tried in."""

DISSOLVED: Final = 2
"""Number of clusters that are dissolved, one at a time, for a plan with one fewer; their members join the others."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The result of one change."""

    change: str
    samples_per_second: float
    gain: float
    """Relative gain of the score: 0.25 is a quarter more. Never below 0, as the plan may stay unchanged."""


@dataclass(frozen=True, slots=True)
class OtherCount:
    """The best plan that was found with another number of clusters."""

    clusters: int
    samples_per_second: float
    gain: float
    """Relative gain of the score; below 0 for a loss."""


def what_ifs(case: Case, plan: Proposal, search: Search | None = None) -> tuple[WhatIf, ...]:
    """The changes by their gain, the largest first, also those without one."""
    questions = _Questions(case, plan, search if len(case.providers) <= SEARCHED else None)
    found = [*questions.one_more_machine(), *questions.better_at_the_bottleneck(), *questions.better_around()]
    return tuple(sorted(found, key=lambda one: -one.gain))


def other_counts(case: Case, plan: Proposal, search: Search | None = None) -> tuple[OtherCount, ...]:
    """The plans with at least one cluster fewer, and with one more made by splitting one, as far as possible."""
    questions = _Questions(case, plan, search if len(case.providers) <= SEARCHED else None)
    found = []
    for other in (questions.one_cluster_fewer(), questions.one_cluster_more()):
        if other is not None and other.clusters:
            rate, gain = other.predicted_samples_per_second, other.score / plan.score - 1
            found.append(OtherCount(len(other.clusters), rate, gain))
    return tuple(found)


def gain_of_using(case: Case, plan: Proposal, name: str) -> float:
    """Relative gain from the best use of one standby; 0 or less if there is no good one."""
    tried = _tried(case, plan, [name], ())
    return max((other.score for other in tried), default=0.0) / plan.score - 1


@dataclass(frozen=True, slots=True)
class _Questions:
    case: Case
    plan: Proposal
    search: Search | None

    def one_more_machine(self) -> Iterator[WhatIf]:
        by_speed = sorted(self.case.providers.values(), key=lambda p: (-p.compute_speed, p.name))
        like = [("the fastest", by_speed[0]), ("the middle one", by_speed[len(by_speed) // 2])]
        if figures(like[0][1]) == figures(like[1][1]):
            like.pop()
        for word, provider in like:
            twin = replace(provider, name=f"{provider.name}, once more", host="")
            case = replace(self.case, providers={**self.case.providers, twin.name: twin})
            tried = [proposal_of(case.goal, case.network, case.providers, self.plan.clusters)]
            tried += _tried(case, self.plan, [twin.name], self.plan.standbys)
            yield self._answer(case, tried, f"one more machine like {provider.name} ({word})", self.search)

    def better_at_the_bottleneck(self) -> Iterator[WhatIf]:
        """More of each property where it is scarcest, in the cluster that gains most."""
        for word, (scarce, better) in _BETTER.items():
            found: list[tuple[WhatIf, Case, list[Proposal], list[Proposal]]] = []
            for cluster in self._fastest():
                name = max(
                    cluster.stages, key=lambda stage: scarce(stage, self.case.providers[stage.provider])
                ).provider
                case = better(self.case, name)
                tried = [self._with(case, cluster, changed) for changed in _refitted(case, cluster)]
                # A plan that was not chosen by its score may improve with other cuts alone: that is not counted.
                unchanged = [self._with(self.case, cluster, same) for same in _refitted(self.case, cluster)]
                found.append((self._answer(case, tried, f"{word} of {name}", None, unchanged), case, tried, unchanged))
            best, case, tried, unchanged = max(found, key=lambda one: one[0].gain)
            yield self._answer(case, tried, best.change, self.search, unchanged)

    def better_around(self) -> Iterator[WhatIf]:
        """More of the resources that all clusters share."""
        goal = replace(self.case.goal, average_every=2 * self.case.goal.average_every)
        if self.plan.averaging_seconds:
            rarer = replace(self.case, goal=goal)
            same = proposal_of(goal, self.case.network, self.case.providers, self.plan.clusters)
            # Rounds that do not slow down training cost nothing, though plans with short ones are preferred.
            if same.predicted_samples_per_second > self.plan.predicted_samples_per_second:
                yield self._answer(rarer, [same], "half as many rounds of averaging", None)
        if self.plan.limit:
            requester = self.case.network.requester
            line = replace(
                requester,
                up_bytes_per_second=2 * requester.up_bytes_per_second,
                down_bytes_per_second=2 * requester.down_bytes_per_second,
            )
            case = replace(self.case, network=replace(self.case.network, requester=line))
            same = proposal_of(case.goal, case.network, case.providers, self.plan.clusters)
            yield self._answer(case, [same], "twice the requester's line", None)

    def one_cluster_fewer(self) -> Proposal | None:
        count = len(self.plan.clusters) - 1
        if count < 1:
            return None
        case = replace(self.case, goal=replace(self.case.goal, max_clusters=count))
        if found := self._searched(case):
            return found[0]
        tried: list[Proposal] = []
        for cluster in sorted(self.plan.clusters, key=lambda c: (c.samples_per_second, c.providers))[:DISSOLVED]:
            rest = [other for other in self.plan.clusters if other != cluster]
            best = proposal_of(case.goal, case.network, case.providers, rest)
            for _ in cluster.providers:
                free = [name for name in cluster.providers if name in best.standbys]
                better = max(_tried(case, best, free, ()), key=lambda plan: plan.score, default=best)
                if better.score <= best.score:
                    break
                best = better
            tried.append(best)
        return max(tried, key=lambda plan: plan.score)

    def one_cluster_more(self) -> Proposal | None:
        most = self.case.goal.max_clusters
        if most is not None and len(self.plan.clusters) >= most:
            return None
        tried = []
        for cluster in sorted(self.plan.clusters, key=lambda c: (-len(c.stages), c.providers))[:LOOKED_AT]:
            members = sorted(
                self.case.named(cluster.providers), key=lambda p: (-p.compute_speed, -p.memory_bytes, p.name)
            )
            half = len(members) // 2
            for one, other in ((members[::2], members[1::2]), (members[:half], members[half:])):
                parts = [self.case.in_any_order(part) for part in (one, other) if part]
                if len(parts) == 2 and all(part is not None and self.case.allows(part) for part in parts):
                    tried.append(self._with(self.case, cluster, *(part for part in parts if part is not None)))
        return max(tried, key=lambda plan: plan.score, default=None)

    def _fastest(self) -> list[Cluster]:
        """The clusters for which a better machine counts most."""
        return sorted(self.plan.clusters, key=lambda c: (-c.samples_per_second, c.providers))[:LOOKED_AT]

    def _with(self, case: Case, cluster: Cluster, *instead: Cluster) -> Proposal:
        others = [other for other in self.plan.clusters if other != cluster]
        return proposal_of(case.goal, case.network, case.providers, [*others, *instead])

    def _answer(
        self,
        case: Case,
        tried: Sequence[Proposal],
        change: str,
        search: Search | None,
        without: Sequence[Proposal] = (),
    ) -> WhatIf:
        """The best plan that was tried or found, against the plan and its variants `without` the change."""
        found = [*tried, *(self._searched(case) if search else ())]
        base = max([self.plan, *without], key=lambda plan: plan.score)
        best = max([base, *found], key=lambda plan: plan.score)
        return WhatIf(change, best.predicted_samples_per_second, best.score / base.score - 1)

    def _searched(self, case: Case) -> list[Proposal]:
        if self.search is None:
            return []
        try:
            return [self.search(case.goal, case.network, list(case.providers.values()))]
        except PlanError:
            return []


def _tried(case: Case, plan: Proposal, free: Sequence[str], spare: Sequence[str]) -> list[Proposal]:
    """The plans that are one change away and use a free provider."""
    found = []
    for step in improvements(case, plan, free, spare):
        clusters = [cluster for cluster in plan.clusters if cluster not in step.removed]
        found.append(proposal_of(case.goal, case.network, case.providers, [*clusters, *step.added]))
    return found


def _refitted(case: Case, cluster: Cluster) -> list[Cluster]:
    """The cluster with the members as the case has them: with its cuts, with others, and in another order."""
    members = case.named(cluster.providers)
    found = [case.with_same_cuts(members, cluster), case.with_new_cuts(members), case.in_any_order(members)]
    return [one for one in found if one is not None]


def _faster_line(case: Case, name: str) -> Case:
    provider = case.providers[name]
    faster = replace(
        provider,
        up_bytes_per_second=2 * provider.up_bytes_per_second,
        down_bytes_per_second=2 * provider.down_bytes_per_second,
    )
    measured: Mapping[tuple[str, str], Line] = {
        pair: Line(2 * line.bytes_per_second, line.latency_seconds) if name in pair else line
        for pair, line in case.network.measured.items()
    }
    network = replace(case.network, measured=measured)
    return replace(case, network=network, providers={**case.providers, name: faster})


def _more_memory(case: Case, name: str) -> Case:
    provider = case.providers[name]
    return replace(case, providers={**case.providers, name: replace(provider, memory_bytes=2 * provider.memory_bytes)})


def _faster_machine(case: Case, name: str) -> Case:
    provider = case.providers[name]
    faster = replace(provider, compute_speed=2 * provider.compute_speed, memory_speed=2 * provider.memory_speed)
    return replace(case, providers={**case.providers, name: faster})


_BETTER: Final[Mapping[str, tuple[Callable[[StageCost, Provider], float], Callable[[Case, str], Case]]]] = {
    "twice the line": (lambda stage, _: max(stage.up_seconds, stage.down_seconds, stage.line_seconds), _faster_line),
    "twice the memory": (lambda stage, provider: stage.memory_bytes / provider.memory_bytes, _more_memory),
    "twice the speed": (lambda stage, _: stage.compute_seconds, _faster_machine),
}
"""Properties of a machine: how scarce each is at a stage, and the case with twice of it."""

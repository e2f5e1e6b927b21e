"""Small changes of a plan: the steps from which one is chosen when a machine is lost, joins or slows down.

Each step takes some clusters of a plan away and puts others in their place, and says so in words. Which step is worth
taking is not decided here. Of many machines and clusters only the likeliest are tried, so a step is found quickly in a
plan of any size.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ravnest.planner.cluster import Cluster
from ravnest.planner.link_codecs import assumed_share
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal
from ravnest.planner.search.cuts import best_cuts
from ravnest.planner.search.same_cuts import any_order, cuts_of, same_cuts, with_one_more

HELPERS: Final = 6
"""How many of those who stand by are tried for one place."""

NEIGHBOURS: Final = 5
"""How many other clusters are tried for one machine."""

MERGED: Final = 2
"""How many other clusters those who are left of one are tried in."""

MORE: Final = 3
"""How many machines a broken cluster gets at most beyond those it lost."""


@dataclass(frozen=True, slots=True)
class Case:
    """The model and the machines that are there."""

    model: ModelCosts
    rough: ModelCosts
    """The same with fewer places, for cuts that are tried out."""
    goal: Goal
    network: Network
    providers: Mapping[str, Provider]

    def named(self, names: Sequence[str]) -> list[Provider]:
        return [self.providers[name] for name in names]

    def allows(self, cluster: Cluster) -> bool:
        return len(cluster.stages) >= min(self.goal.min_stages, len(self.providers))

    def cut_anew(self, order: Sequence[Provider]) -> Cluster | None:
        return best_cuts(self.rough, self.goal, self.network, order)

    def in_any_order(self, members: Sequence[Provider]) -> Cluster | None:
        return any_order(self.rough, self.goal, self.network, members)

    def with_one_more(self, order: Sequence[Provider], one_more: Provider) -> Cluster | None:
        return with_one_more(self.rough, self.goal, self.network, order, one_more)

    def cut_alike(self, order: Sequence[Provider], like: Cluster) -> Cluster | None:
        cuts = cuts_of(self.model, like)
        return same_cuts(self.model, self.goal, self.network, order, cuts, like.in_flight)


@dataclass(frozen=True, slots=True)
class Step:
    """Clusters of a plan that others replace."""

    removed: tuple[Cluster, ...]
    added: tuple[Cluster, ...]
    words: str


def repairs(case: Case, plan: Proposal, cluster: Cluster, gone: Collection[str]) -> Iterator[Step]:
    """Ways to make a cluster without those who are gone; it may be one of the plan, or none any more.

    With nobody gone, ways to make it of the same members.
    """
    removed = (cluster,) if cluster in plan.clusters else ()
    # Of two broken clusters the first may have taken somebody of the second.
    there = cluster.providers if removed else plan.standbys
    left = [name for name in cluster.providers if name in there and name not in gone]
    out = [name for name in cluster.providers if name not in left]
    helpers = [name for name in plan.standbys if name not in gone and name not in left]
    any_found = False
    for found, words in (
        *_taken_over(case, cluster, out, helpers),
        *_shared_anew(case, left, out),
        *_with_more(case, left, helpers),
    ):
        if found is not None and case.allows(found):
            any_found = True
            yield Step(removed, (found,), words)
    if out and not (left and any_found):
        yield from (replace(step, removed=removed) for step in _new_clusters(case, left, helpers))
    if left and out:
        for other in _likely(case, [c for c in plan.clusters if c != cluster], left[0])[:MERGED]:
            larger: Cluster | None = other
            for name in left:
                if larger is not None:
                    larger = case.with_one_more(case.named(larger.providers), case.providers[name])
            if larger is not None:
                yield Step((*removed, other), (larger,), f"{listed(left)} {_join(left)} {_cluster_of(other)}")
    if removed:
        yield Step(removed, (), f"{_cluster_of(cluster)} is dissolved")


def improvements(case: Case, plan: Proposal, free: Sequence[str], spare: Sequence[str]) -> Iterator[Step]:
    """Ways to use those of a plan who stand by: the free ones in a cluster that is there or a new one, the spare ones
    to make up the number of a new one."""
    for name in _unlike(case, free)[:HELPERS]:
        for cluster in _likely(case, plan.clusters, name):
            larger = case.with_one_more(case.named(cluster.providers), case.providers[name])
            if larger is not None:
                yield Step((cluster,), (larger,), f"{name} joins {_cluster_of(cluster)}, which is cut anew")
            slowest = max(cluster.stages, key=lambda stage: stage.seconds).provider
            for found, words in _taken_over(case, cluster, [slowest], [name]):
                if found is not None:
                    yield Step((cluster,), (found,), words)
    if free and (case.goal.max_clusters is None or len(plan.clusters) < case.goal.max_clusters):
        yield from _new_clusters(case, free, spare)


def listed(names: Sequence[str]) -> str:
    """ "ann", "ann and bob", "ann, bob and cat"; of very many the first ones."""
    if len(names) > _LISTED + 1:
        return f"{', '.join(names[:_LISTED])} and {len(names) - _LISTED} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


Figures = tuple[int, float, float, float, float, float, bool, str]


def figures(provider: Provider) -> Figures:
    """What two machines must share so that a plan may take either."""
    p = provider
    line = p.up_bytes_per_second, p.down_bytes_per_second, p.latency_seconds, p.reachable, p.host
    return p.memory_bytes, p.compute_speed, p.memory_speed, *line


_LISTED = 8

_Found = tuple[Cluster | None, str]


def _taken_over(case: Case, cluster: Cluster, out: Sequence[str], helpers: Sequence[str]) -> Iterator[_Found]:
    """Others in the place of those who are out: with their stages as they are, or cut anew."""
    for takers in _takers(case, cluster, out, helpers):
        order = [case.providers[takers.get(name, name)] for name in cluster.providers]
        pairs = listed([f"{taker} takes the stage of {name}" for name, taker in takers.items()])
        yield case.cut_alike(order, cluster), f"{pairs} as it is"
        if len(order) > 1:
            yield case.cut_anew(order), f"{pairs}, and the cluster is cut anew"


def _takers(case: Case, cluster: Cluster, out: Sequence[str], helpers: Sequence[str]) -> Iterator[dict[str, str]]:
    """Who may take the stages of those who are out. For one stage all likely ones; for several the best for each, the
    heaviest stage first."""
    if not out or len(helpers) < len(out):
        return
    stages = {stage.provider: stage for stage in cluster.stages}
    if len(out) == 1:
        for helper in _fittest(case, cluster, out[0], helpers)[:HELPERS]:
            yield {out[0]: helper}
        return
    taken: dict[str, str] = {}
    for name in sorted(out, key=lambda name: (-stages[name].compute_seconds, name)):
        rest = [helper for helper in helpers if helper not in taken.values()]
        taken[name] = _fittest(case, cluster, name, rest)[0]
    yield {name: taken[name] for name in out}


def _fittest(case: Case, cluster: Cluster, name: str, helpers: Sequence[str]) -> list[str]:
    """Those who stand by, the one that would have the stage of `name` done first at the head."""
    model, index = case.model, {place: i for i, place in enumerate(case.model.places)}
    stage = next(stage for stage in cluster.stages if stage.provider == name)
    i, j = index[stage.start], index[stage.end]
    heavy, light = (float(sums[j] - sums[i]) for sums in (model.heavy_seconds, model.light_seconds))
    forward, backward = model.carried(assumed_share(case.goal))
    sent = float(backward[i] + forward[j])
    received = float(forward[i] + backward[j]) + stage.fed_bytes

    def seconds(helper: str) -> tuple[bool, float, str]:
        p = case.providers[helper]
        work = heavy / p.compute_speed + light / p.memory_speed
        lines = max(sent / p.up_bytes_per_second, received / p.down_bytes_per_second)
        return p.memory_bytes < stage.memory_bytes, max(work, lines), helper

    return sorted(helpers, key=seconds)


def _shared_anew(case: Case, left: Sequence[str], out: Sequence[str]) -> Iterator[_Found]:
    """Those who are left by themselves."""
    if not left or (len(left) == 1 and not out):
        return
    without = f" without {listed(out)}" if out else " anew"
    holds = "holds the model" if len(left) == 1 else "share the model"
    yield case.cut_anew(case.named(left)), f"{listed(left)} {holds}{without}"
    if len(left) > 1:
        yield case.in_any_order(case.named(left)), f"{listed(left)} share the model{without}, in another order"


def _with_more(case: Case, left: Sequence[str], helpers: Sequence[str]) -> Iterator[_Found]:
    """Those who are left, with some who stand by and who need not be as many as were lost."""
    if not left:
        return
    in_turn = _best_first(case, helpers)
    for count in range(1, min(MORE, len(in_turn)) + 1):
        joining = in_turn[:count]
        if count == 1:
            found = case.with_one_more(case.named(left), case.providers[joining[0]])
            yield found, f"{joining[0]} joins {listed(left)}, and the cluster is cut anew"
        yield (
            case.in_any_order(case.named([*left, *joining])),
            f"{listed(joining)} {_join(joining)} {listed(left)}, in another order",
        )


def _new_clusters(case: Case, free: Sequence[str], spare: Sequence[str]) -> Iterator[Step]:
    """Clusters of those who are free, and of spare ones where these are too few: of the fewest of the best that can
    hold the model, and of some more."""
    in_turn = _best_first(case, free) + _best_first(case, spare)
    found = 0
    for count in range(max(1, case.goal.min_stages), min(len(in_turn), case.model.max_stages, _LARGEST) + 1):
        members = in_turn[:count]
        cluster = case.in_any_order(case.named(members))
        if cluster is not None:
            yield Step((), (cluster,), f"{listed(members)} form{'s' if count == 1 else ''} a new cluster")
            found += 1
        if found > MORE:
            return


_LARGEST = 12


def _best_first(case: Case, names: Sequence[str]) -> list[str]:
    """Who would be done first with a typical stage: its work, what crosses its ends, and its part of a round."""
    model = case.model
    heavy, light, size = (
        float(sums[-1]) / _TYPICAL for sums in (model.heavy_seconds, model.light_seconds, model.parameter_bytes)
    )
    forward, backward = model.carried(assumed_share(case.goal))
    crossing = float(np.median(forward + backward))

    def seconds(name: str) -> tuple[float, str]:
        p = case.providers[name]
        line = min(p.up_bytes_per_second, p.down_bytes_per_second)
        work = heavy / p.compute_speed + light / p.memory_speed
        return max(work, crossing / line) + 2 * size / line / case.goal.average_every, name

    return sorted(names, key=seconds)


_TYPICAL: Final = 4
"""Of so many stages, for want of a better guess."""


def _unlike(case: Case, names: Sequence[str]) -> list[str]:
    """One of each kind, the best first: of two that are alike in all figures the first by name will do."""
    kinds: dict[Figures, str] = {}
    for name in _best_first(case, names):
        kinds.setdefault(figures(case.providers[name]), name)
    return list(kinds.values())


def _likely(case: Case, clusters: Sequence[Cluster], name: str) -> list[Cluster]:
    """The clusters to which one more machine like this may bring most: fast ones for which it is a large part."""
    speed = case.providers[name].compute_speed

    def gain(cluster: Cluster) -> tuple[float, str]:
        others = sum(case.providers[n].compute_speed for n in cluster.providers)
        return -cluster.samples_per_second * speed / (others + speed), cluster.providers[0]

    return sorted(clusters, key=gain)[:NEIGHBOURS]


def _join(names: Sequence[str]) -> str:
    return "joins" if len(names) == 1 else "join"


def _cluster_of(cluster: Cluster) -> str:
    return f"the cluster of {listed(cluster.providers)}"

"""The paper's rule for clusters, restated (arXiv 2401.01728): a genetic search over the members of each cluster.

Its fitness depends only on the RAM that a cluster lacks, and on the differences of RAM and bandwidth inside clusters.
The number of clusters is the one that the RAM of all machines could hold, and the model is cut into equal shares by
size. Speeds, the order of stages, the traffic at a cut and the cost of averaging play no part.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.planning.instances import Instance
from ravnest.planner.cluster import Cluster, cluster_of, memory_bytes
from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.problem import Provider
from ravnest.planner.search.objective import score
from ravnest.planner.shared_limits import totals

_POPULATION = 60
_GENERATIONS = 60


@dataclass(frozen=True, slots=True)
class PaperPlan:
    """The plan of that rule for an instance, judged by our planner's cost model."""

    score: float
    """Score of the clusters that fit; 0 if none does."""
    clusters: int
    fitting: int


def paper_plan(instance: Instance, seed: int = 0) -> PaperPlan:
    """The clusters of the rule, each with its best number of microbatches in flight."""
    groups = _groups(instance, seed)
    found = [cluster for group in groups if (cluster := _equal_shares(instance, group)) is not None]
    by_name = {p.name: p for p in instance.providers}
    value = totals(instance.goal, instance.network, by_name, found).score if found else 0.0
    return PaperPlan(value, len(groups), len(found))


def _groups(instance: Instance, seed: int) -> list[list[Provider]]:
    """The fittest assignment of providers to clusters after all generations."""
    providers = instance.providers
    need = float(memory_bytes(instance.model, instance.goal, 1)[0, -1])
    memory = np.array([float(p.memory_bytes) for p in providers])
    bandwidth = np.array([min(p.up_bytes_per_second, p.down_bytes_per_second, 1e12) for p in providers])
    count = max(1, min(len(providers), int(memory.sum() // need)))
    rng = np.random.default_rng(seed)
    population = rng.integers(0, count, (_POPULATION, len(providers)))
    for _ in range(_GENERATIONS):
        fitness = np.array([_fitness(one, count, need, memory, bandwidth) for one in population])
        parents = population[np.argsort(-fitness, kind="stable")][: _POPULATION // 2]
        pairs = rng.integers(0, len(parents), (_POPULATION - len(parents), 2))
        mixed = np.where(rng.random((len(pairs), len(providers))) < 0.5, parents[pairs[:, 0]], parents[pairs[:, 1]])
        changed = rng.random(mixed.shape) < 1 / len(providers)
        children = np.where(changed, rng.integers(0, count, mixed.shape), mixed)
        population = np.concatenate([parents, children])
    best = max(population, key=lambda one: _fitness(one, count, need, memory, bandwidth))
    groups = [[p for p, number in zip(providers, best, strict=True) if number == c] for c in range(count)]
    return [group for group in groups if group]


def _fitness(assigned: np.ndarray, count: int, need: float, memory: Table, bandwidth: Table) -> float:
    """The negative sum of missing RAM and of differences inside clusters, both as shares; 0 is best."""
    worst = 0.0
    for number in range(count):
        members = assigned == number
        worst += 4 * max(0.0, 1 - float(memory[members].sum()) / need)
        if members.any():
            worst += float(np.std(memory[members]) / np.mean(memory)) + float(
                np.std(bandwidth[members]) / np.mean(bandwidth)
            )
    return -worst


def _equal_shares(instance: Instance, group: Sequence[Provider]) -> Cluster | None:
    """A group in the given order, each with the same share of the parameters; None if a provider cannot hold its
    share."""
    model, goal = instance.model, instance.goal
    group = group[: model.max_stages]
    cuts = equal_cuts(model, len(group))
    best: Cluster | None = None
    for in_flight in range(1, goal.max_in_flight + 1 if len(group) > 1 else 2):
        cluster = cluster_of(model, goal, instance.network, group, cuts, in_flight)
        fits = all(s.memory_bytes <= p.memory_bytes for s, p in zip(cluster.stages, group, strict=True))
        if fits and (best is None or score(goal, cluster) > score(goal, best)):
            best = cluster
    return best


def equal_cuts(model: ModelCosts, stages: int) -> tuple[int, ...]:
    """The places nearest to equal shares of the parameters' bytes, with at least one parameter in each stage."""
    cuts: list[int] = []
    for number in range(1, stages):
        wanted = model.parameter_bytes[-1] * number / stages
        left = stages - number
        places = [
            place
            for place in range((cuts[-1] if cuts else 0) + 1, model.last)
            if model.legal[cuts[-1] if cuts else 0, place] and model.parameters[-1] - model.parameters[place] >= left
        ]
        cuts.append(min(places, key=lambda place: (abs(model.parameter_bytes[place] - wanted), place)))
    assert all(a < b for a, b in itertools.pairwise(cuts))
    return tuple(cuts)

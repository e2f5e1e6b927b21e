"""Random models and machines to plan for: home PCs of unequal memory, speed and lines."""

import itertools
from dataclasses import dataclass

import numpy as np

from ravnest.planner.cluster import memory_bytes
from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.problem import Goal, Line, Network, Provider, Requester

_MEGABIT = 1e6 / 8


@dataclass(frozen=True, slots=True)
class Instance:
    """One planning problem."""

    name: str
    model: ModelCosts
    goal: Goal
    network: Network
    providers: list[Provider]


def random_instance(seed: int, count: int, places: int = 11) -> Instance:
    """A problem with `count` providers, a model of random size and random lines; some have measured lines, machines
    that cannot be dialled, a shared host, or a requester on a slow line."""
    rng = np.random.default_rng((seed, count))
    model = random_model(rng, places)
    goal = Goal(
        average_every=int(rng.choice([100, 300, 1000])),
        versions="recompute" if rng.random() < 0.2 else "stash",
        max_staleness=int(rng.integers(1, 8)) if rng.random() < 0.2 else None,
    )
    providers = random_providers(rng, count, model, goal)
    measured = {}
    if rng.random() < 0.4:
        for one, other in itertools.permutations(providers, 2):
            if rng.random() < 0.5:
                rate = min(one.up_bytes_per_second, other.down_bytes_per_second) * float(rng.uniform(0.3, 1.0))
                measured[one.name, other.name] = Line(rate, float(rng.uniform(0.002, 0.08)))
    requester = Requester()
    if rng.random() < 0.3:
        rate = float(rng.choice([50, 200, 1000])) * _MEGABIT
        requester = Requester(up_bytes_per_second=rate, down_bytes_per_second=rate)
    return Instance(f"{count} providers, seed {seed}", model, goal, Network(measured, requester), providers)


def random_model(rng: np.random.Generator, places: int) -> ModelCosts:
    """A model of unequal parts: tens of megabytes to gigabytes, tenths of a second to seconds for a microbatch."""
    parts = places - 1
    work = rng.gamma(2, 1, parts)
    work *= float(np.exp(rng.uniform(np.log(0.2), np.log(3)))) / work.sum()
    owned = rng.gamma(1, 1, parts)
    owned *= float(np.exp(rng.uniform(np.log(4e7), np.log(2e9)))) / owned.sum()
    crossing = rng.uniform(1e5, 3e6, parts - 1) * float(rng.choice([0.3, 1.0, 3.0]))
    traffic = np.concatenate([[0], crossing, [0]])
    uses = np.zeros((2, places))
    uses[0, 1:] = 1
    uses[1, -1] = 1
    return ModelCosts(
        places=tuple(range(places)),
        heavy_seconds=_sums(work * 0.8),
        light_seconds=_sums(work * 0.2),
        heavy_forward_seconds=_sums(work * 0.8 / 3),
        light_forward_seconds=_sums(work * 0.2 / 3),
        parameter_bytes=_sums(owned),
        parameters=_sums(np.ones(parts)),
        saved_bytes=_sums(rng.uniform(0.02, 0.3, parts) * owned.sum() / parts),
        forward_bytes=traffic,
        backward_bytes=traffic,
        input_bytes=(1e5, 1e3),
        input_uses=uses,
        samples=8,
    )


def random_providers(rng: np.random.Generator, count: int, model: ModelCosts, goal: Goal) -> list[Provider]:
    """Machines, a few of which could hold the whole model, and most a part of it."""
    needed = float(memory_bytes(model, goal, 2)[0, -2:].max())
    ups = np.array([10, 20, 50, 100, 500]) * (5 if rng.random() < 0.4 else 1)
    shared = count > 2 and rng.random() < 0.2
    found = []
    for i in range(count):
        found.append(
            Provider(
                name=f"p{i:05d}",
                memory_bytes=int(needed * rng.uniform(0.2, 1.3)),
                compute_speed=float(np.exp(rng.normal(0, 0.6))),
                memory_speed=float(np.exp(rng.normal(0, 0.4))),
                up_bytes_per_second=float(rng.choice(ups)) * _MEGABIT,
                down_bytes_per_second=float(rng.choice([50, 100, 500, 1000])) * _MEGABIT,
                latency_seconds=float(rng.uniform(0.002, 0.05)),
                reachable=bool(rng.random() < 0.8),
                host="shared" if shared and i < 2 else "",
                cores=4,
                threads=4 if shared and i < 2 else 1,
            )
        )
    return found


def _sums(values: Table) -> Table:
    return np.concatenate([[0.0], np.cumsum(values)])

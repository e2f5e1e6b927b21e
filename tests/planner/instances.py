"""Random models and machines for the planner's tests."""

import numpy as np

from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.problem import Provider

MEGABIT = 1e6 / 8


def random_model(
    rng: np.random.Generator, places: int = 13, seconds: float = 1.0, parameter_bytes: float = 4e8, samples: int = 8
) -> ModelCosts:
    """A model of unequal parts, each with a parameter."""
    parts = places - 1
    work = rng.gamma(2, 1, parts)
    work *= seconds / work.sum()
    owned = rng.gamma(1, 1, parts)
    owned *= parameter_bytes / owned.sum()
    crossing = np.concatenate([[0], rng.uniform(1e5, 3e6, parts - 1), [0]])
    first, last = np.eye(parts)[0], np.eye(parts)[-1]
    return ModelCosts(
        places=tuple(range(places)),
        heavy_seconds=_sums(work * 0.8),
        light_seconds=_sums(work * 0.2),
        heavy_forward_seconds=_sums(work * 0.8 / 3),
        light_forward_seconds=_sums(work * 0.2 / 3),
        parameter_bytes=_sums(owned),
        parameters=_sums(np.ones(parts)),
        saved_bytes=_sums(rng.uniform(1e6, 4e7, parts)),
        forward_bytes=crossing,
        backward_bytes=crossing,
        input_bytes=(1e5, 1e3),
        input_uses=np.array([_sums(first), _sums(last)]),
        samples=samples,
    )


def random_providers(
    rng: np.random.Generator, count: int, gib: tuple[float, float] = (1, 6), reliability: float = 1.0
) -> list[Provider]:
    """Home machines: unequal in everything."""
    return [
        Provider(
            name=f"p{i}",
            memory_bytes=int(rng.uniform(*gib) * 2**30),
            compute_speed=float(np.exp(rng.normal(0, 0.6))),
            memory_speed=float(np.exp(rng.normal(0, 0.4))),
            up_bytes_per_second=float(rng.choice([10, 20, 50, 100, 500])) * MEGABIT,
            down_bytes_per_second=float(rng.choice([50, 100, 500])) * MEGABIT,
            latency_seconds=float(rng.uniform(0.005, 0.05)),
            reliability=reliability,
        )
        for i in range(count)
    ]


def _sums(values: Table) -> Table:
    return np.concatenate([[0.0], np.cumsum(values)])

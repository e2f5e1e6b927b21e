"""Shortage of memory for a model that fits nowhere: its size, and changes that would make the model fit."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ravnest.errors import PlanError
from ravnest.planner.cluster import memory_bytes
from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.problem import Goal, Provider
from ravnest.version_policy import POLICIES

_GIB: Final = 2**30
_MAX_STAGES: Final = 48
_PLACES: Final = 129


def cannot_be_held(model: ModelCosts, goal: Goal, providers: Sequence[Provider]) -> PlanError:
    """The error for the user if no plan was found."""
    if not providers:
        return PlanError("There is no provider to plan with: let at least one join.")
    if goal.min_clusters == 1 and goal.min_stages > len(providers):
        return PlanError(
            f"A cluster is to have at least {goal.min_stages} stages, and there are {len(providers)} providers: "
            "let more of them join, or ask for fewer stages."
        )
    if goal.min_clusters == 1 and goal.min_stages > model.max_stages:
        stages = "1 stage" if model.max_stages == 1 else f"{model.max_stages} stages"
        return PlanError(
            f"The model can be cut into at most {stages}, and a cluster is to have at least {goal.min_stages}: "
            f"use at most {model.max_stages} of the providers, or more clusters."
        )
    if goal.min_clusters > 1:
        refusal = _too_many_clusters(model, goal, providers)
        if refusal is not None:
            return refusal
        # The model does not fit once for each cluster; it may not even fit once.
        goal = replace(goal, min_clusters=1, max_clusters=1, min_stages=1, min_providers=0)
    found = smallest_shortage(model, goal, providers)
    machines = "provider" if len(providers) == 1 else f"{len(providers)} providers"
    text = (
        f"The model does not fit on the {machines}: cut at its best, it lacks {_gib(found.lacking_bytes)} on "
        f"{found.provider}, whose stage takes {_gib(found.stage_bytes)} and which has {_gib(found.memory_bytes)}."
    )
    fixes = _fixes(model, goal, providers)
    if len(providers) >= model.max_stages:
        fixes.append(f"{_gib(found.lacking_bytes)} more memory on each of them")
    return PlanError(f"{text} What would make it fit: {', or '.join(fixes)}.")


def _too_many_clusters(model: ModelCosts, goal: Goal, providers: Sequence[Provider]) -> PlanError | None:
    """The reason against this number of clusters; None if the model does not even fit once."""
    clusters, most = goal.min_clusters, model.max_stages
    if clusters > len(providers):
        return PlanError(
            f"There are to be {clusters} clusters, and there are {len(providers)} providers: let more of them join, or "
            "ask for fewer clusters."
        )
    if goal.min_providers > clusters * most:
        return PlanError(
            f"The model can be cut into at most {most} stage{'s' if most > 1 else ''}, so that {clusters} clusters "
            f"have work for {clusters * most} providers, not {goal.min_providers}: use --providers "
            f"{clusters * most} or fewer, or more clusters."
        )
    once = replace(goal, min_clusters=1, max_clusters=1, min_stages=1, min_providers=0)
    if smallest_shortage(model, once, providers).lacking_bytes:
        return None
    smallest = float(np.min(np.where(model.legal, memory_bytes(model, goal, goal.in_flight or 1), np.inf)))
    small = [p.name for p in providers if p.memory_bytes < smallest]
    if goal.min_providers and small:
        return PlanError(
            f"Not all of {goal.min_providers} providers can have a stage: the smallest takes {_gib(smallest)}, and "
            f"{small[0]} has less; lend more memory there, or leave it out."
        )
    whole = float(memory_bytes(model, goal, goal.in_flight or 1)[0, -1])
    have = sum(p.memory_bytes for p in providers)
    return PlanError(
        f"The model does not fit {clusters} times on the {len(providers)} providers: a copy takes about {_gib(whole)}, "
        f"with what averaging keeps, and they have {_gib(have)} together; let more of them join, or ask for fewer "
        "clusters."
    )


@dataclass(frozen=True, slots=True)
class Shortage:
    """The cuts with the smallest shortage: the provider with the largest shortage among them; 0 if the model fits."""

    provider: str
    stage_bytes: float
    memory_bytes: float
    order: tuple[Provider, ...]

    @property
    def lacking_bytes(self) -> float:
        return max(0.0, self.stage_bytes - self.memory_bytes)


def smallest_shortage(model: ModelCosts, goal: Goal, providers: Sequence[Provider]) -> Shortage:
    """The cuts with the smallest shortage over orders by memory and numbers of stages, with the fewest in flight."""
    coarse = model.coarser(_PLACES)
    best: tuple[float, Shortage] | None = None
    by_memory = sorted(providers, key=lambda p: (-p.memory_bytes, p.name))
    most = min(len(providers), model.max_stages, _MAX_STAGES)
    tables = {n: np.where(coarse.legal, memory_bytes(coarse, goal, n), np.inf) for n in {1, goal.in_flight or 1}}
    for count in range(min(goal.min_stages, most), most + 1):
        held = tables[1 if count == 1 else goal.in_flight or 1]
        chosen = by_memory[:count]
        middle = [*chosen[::2], *chosen[1::2][::-1]]
        for order in (chosen, chosen[::-1], middle):
            lacking, bounds = _with_smallest_shortage(held, [float(p.memory_bytes) for p in order])
            if best is None or lacking < best[0]:
                stages = [float(held[i, j]) for i, j in itertools.pairwise(bounds)]
                worst = max(range(count), key=lambda k: stages[k] - order[k].memory_bytes)
                provider = order[worst]
                found = Shortage(provider.name, stages[worst], float(provider.memory_bytes), tuple(order))
                best = lacking, found
    assert best is not None
    return best[1]


def fitting_order(model: ModelCosts, goal: Goal, providers: Sequence[Provider]) -> tuple[Provider, ...] | None:
    """An order of some of these providers in which the model fits, if one is found."""
    found = smallest_shortage(model, goal, providers)
    return None if found.lacking_bytes else found.order


def _with_smallest_shortage(held: Table, memory: Sequence[float]) -> tuple[float, list[int]]:
    """The cuts with the smallest maximum of memory that a stage lacks."""
    best = held[0] - memory[0]
    back = []
    for has in memory[1:]:
        through = np.maximum(best[:, None], held - has)
        start = np.argmin(through, axis=0)
        back.append(start)
        best = through[start, np.arange(len(best))]
    bounds = [len(best) - 1]
    for start in reversed(back):
        bounds.append(int(start[bounds[-1]]))
    return float(best[-1]), [0, *reversed(bounds)]


def _fixes(model: ModelCosts, goal: Goal, providers: Sequence[Provider]) -> list[str]:
    """Changes that would make the model fit, as far as they are known."""
    fixes = []
    if goal.in_flight is not None and goal.in_flight > 1 and _fits(model, replace(goal, in_flight=1), providers):
        fixes.append("pipeline.in_flight=1")
    for name, policy in POLICIES.items():
        is_other = name != goal.versions and not policy.within_accumulate
        if is_other and _fits(model, replace(goal, versions=name), providers):
            fixes.append(f'pipeline.versions="{name}"')
            break
    if len(providers) < model.max_stages:
        fixes.append(_more(model, goal, providers))
    if model.saved_bytes[-1] > 0.25 * model.parameter_bytes[-1]:
        fixes.append("a smaller microbatch")
    return fixes


def _more(model: ModelCosts, goal: Goal, providers: Sequence[Provider]) -> str:
    """The number and memory of further machines that would be enough."""
    largest = max(p.memory_bytes for p in providers)
    count = 1
    while count <= 16 and len(providers) + count <= model.max_stages:
        if _fits(model, goal, [*providers, *_machines(count, largest)]):
            low, high = 0.0, float(largest)
            for _ in range(12):
                middle = (low + high) / 2
                fits = _fits(model, goal, [*providers, *_machines(count, int(middle))])
                low, high = (low, middle) if fits else (middle, high)
            return f"{'one more machine' if count == 1 else f'{count} more machines'} of {_gib(high)}"
        count *= 2
    low, high = float(largest), float(memory_bytes(model, goal, goal.in_flight or 1)[0, -1])
    for _ in range(12):
        middle = (low + high) / 2
        fits = _fits(model, goal, [*providers, *_machines(1, int(middle))])
        low, high = (low, middle) if fits else (middle, high)
    return f"one more machine of {_gib(high)}"


def _machines(count: int, memory: int) -> list[Provider]:
    return [Provider(name=f"one more {i}", memory_bytes=memory) for i in range(count)]


def _fits(model: ModelCosts, goal: Goal, providers: Sequence[Provider]) -> bool:
    return not smallest_shortage(model, goal, providers).lacking_bytes


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB / 100 else f"{size / 2**20:.2f} MiB"

"""Choice of a run's version policy if the job leaves it open: the one without a cost, as long as memory lasts.

With a single microbatch in flight, all policies need the same memory. So if memory is short, the question is not
whether "stash" fits, but how many may be in flight for it to fit, and the rate with that number.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ravnest.errors import PlanError
from ravnest.planner.cluster import memory_bytes
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Provider
from ravnest.planner.proposal import Proposal
from ravnest.version_policy import POLICIES

Search = Callable[[Goal], Proposal]
"""The best proposal for this goal; PlanError if the model does not fit."""

CLOSE: Final = 0.95
"""Share of the best score that a policy must reach to be preferred to those after it."""


@dataclass(frozen=True, slots=True)
class VersionChoice:
    """A policy, its plan, and the reason of the choice."""

    goal: Goal
    """With the policy."""
    plan: Proposal
    reason: str


def choose_versions(
    model: ModelCosts, goal: Goal, providers: Sequence[Provider], versions: str | None, search: Search
) -> VersionChoice:
    """The plan with the policy that the job names; without one, the first in the order of POLICIES whose plan is close
    to the best. PlanError, as for the policy with the least memory, if the model fits with none."""
    if versions is not None:
        named = replace(goal, versions=versions)
        return VersionChoice(named, search(named), f'versions "{versions}", as pipeline.versions says')
    goals = [replace(goal, versions=name) for name in POLICIES if _is_possible(goal, name)]
    if memory_to_spare(model, goals[0], providers):
        return VersionChoice(goals[0], search(goals[0]), f'versions "{goals[0].versions}": memory is no limit')
    found: dict[str, VersionChoice] = {}
    refusal: PlanError | None = None
    for each in goals:
        try:
            found[each.versions] = VersionChoice(each, search(each), "")
        except PlanError as error:
            refusal = error
    if not found:
        assert refusal is not None
        raise refusal
    name = preferred({name: choice.plan.score for name, choice in found.items()})
    return replace(found[name], reason=_reason(name, found, goals[0].versions))


def preferred(scores: Mapping[str, float]) -> str:
    """The first policy with a score close to the best: among equals, one with the gradients of its own forward."""
    best = max(scores.values())
    return next(name for name, score in scores.items() if score >= CLOSE * best)


def memory_to_spare(model: ModelCosts, goal: Goal, providers: Sequence[Provider]) -> bool:
    """Whether each provider could hold any stage, with the largest number in flight."""
    largest = float(np.max(memory_bytes(model, goal, goal.max_in_flight)))
    return all(provider.memory_bytes >= largest for provider in providers)


def _is_possible(goal: Goal, name: str) -> bool:
    """Whether enough may be in flight: a policy limited to `accumulate` is of no use if that is 1, and conflicts with a
    larger number in flight that the job sets."""
    if not POLICIES[name].within_accumulate:
        return True
    return goal.accumulate > 1 and (goal.in_flight is None or goal.in_flight <= goal.accumulate)


def _reason(name: str, found: Mapping[str, VersionChoice], first: str) -> str:
    told = ", ".join(f'{c.plan.predicted_samples_per_second:.1f} with "{n}"' for n, c in found.items())
    if name == first:
        return f'versions "{name}": memory is short, and nothing that takes less is much faster (samples/s: {told})'
    short = "the model does not fit" if first not in found else "fewer microbatches can be in flight"
    return f'versions "{name}": with "{first}" {short}, so {_WORDS[name]} (samples/s: {told})'


_WORDS: Final[Mapping[str, str]] = {
    "double": "there are never more than two versions of the weights, nor more in flight than make an update",
    "recompute": "activations are computed a second time instead of being kept",
    "latest": "activations are computed a second time, with the newest weights",
}

"""Choice of a run's version policy if the job leaves it open: by the loss that it costs, then by its memory.

Policies of the same loss compete by memory: the weights that the microbatches in flight need are a multiple of the
model with "stash", and a quarter of that with "stash_8bit". "stash" is exact, so it is taken where its versions are
small next to everything else in the provider's process.

With a single microbatch in flight, all policies need the same memory. So if memory is short, the question is not
whether "stash" fits, but how many may be in flight for it to fit, and the rate with that number.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ravnest.errors import PlanError
from ravnest.planner.cluster import SPARE, StageCost, memory_bytes
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Provider
from ravnest.planner.proposal import Proposal
from ravnest.units import byte_size
from ravnest.version_policy import DEFAULT_POLICY, POLICIES

Search = Callable[[Goal], Proposal]
"""The best proposal for this goal; PlanError if the model does not fit."""

CLOSE: Final = 0.95
"""Share of the best score among policies of equal loss that one must reach to be preferred for its memory."""
WORTH_A_LOSS: Final = 0.8
"""Share of the best score of all that policies must reach to be preferred to those that cost more loss."""
SMALL_SHARE: Final = 0.1
"""Share of the memory of a provider's process up to which versions of the weights are small."""
PROCESS_BYTES: Final = 300e6
"""Memory of a provider's process without a stage, measured by `python -m benchmarks.memory`."""


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
    """The plan with the policy that the job names; without one, with the policy that costs the least loss, and of those
    the least memory, unless its plan is much slower than another. PlanError if the model fits with none."""
    if versions is not None:
        named = replace(goal, versions=versions)
        return VersionChoice(named, search(named), f'versions "{versions}", as pipeline.versions says')
    first, *others = (replace(goal, versions=name) for name in POLICIES if _is_possible(goal, name))
    found: dict[str, VersionChoice] = {}
    if memory_to_spare(model, first, providers):
        found[first.versions] = stash = VersionChoice(first, search(first), "")
        if _versions_are_small(stash):
            return replace(stash, reason=_price(stash))
        # Memory limits no plan, so the policies differ only in the memory of the versions.
        others = [each for each in others if each.policy.coded]
    else:
        others.insert(0, first)
    refusal: PlanError | None = None
    for each in others:
        try:
            found[each.versions] = VersionChoice(each, search(each), "")
        except PlanError as error:
            refusal = error
    if not found:
        assert refusal is not None
        raise refusal
    name = preferred(
        {name: choice.plan.score for name, choice in found.items()},
        {name: max(stage.memory_bytes for stage, _ in _stages(choice)) for name, choice in found.items()},
        [name for name, choice in found.items() if _versions_are_small(choice)],
    )
    return replace(found[name], reason=_reason(name, found))


def preferred(scores: Mapping[str, float], sizes: Mapping[str, float], small: Collection[str]) -> str:
    """The preferred policy, given the score of each policy's plan and the memory of its largest stage.

    Candidates are the policies that cost the least loss and are not much slower than others. The first of them whose
    versions are `small` is preferred, or else the one with the least memory.
    """
    best = max(scores.values())
    for cost in sorted({POLICIES[name].loss_cost for name in scores}):
        equal = [name for name in scores if POLICIES[name].loss_cost == cost]
        fastest = max(scores[name] for name in equal)
        if fastest >= WORTH_A_LOSS * best:
            break
    close = [name for name in equal if scores[name] >= CLOSE * fastest]
    return next((name for name in close if name in small), min(close, key=lambda name: sizes[name]))


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


def _stages(choice: VersionChoice, policy: str | None = None) -> list[tuple[StageCost, float]]:
    """The stages of the choice's plan, each with the bytes of its versions besides the current weights; with `policy`,
    those that it would have with another one."""
    goal = choice.goal
    found = []
    for cluster in choice.plan.clusters:
        kept = POLICIES[policy or goal.versions]
        copies = kept.version_copies(cluster.in_flight, predicts=goal.predicts)
        for stage in cluster.stages[:-1]:
            unread = stage.unread_bytes if kept.keeps_activations else 0.0
            found.append((stage, SPARE * copies * (stage.parameter_bytes - unread)))
        # A leaf keeps none, because its backward follows at once.
        found.append((cluster.stages[-1], 0.0))
    return found


def _versions_are_small(choice: VersionChoice) -> bool:
    """Whether the versions are a small part of the memory of every provider's process."""
    return all(
        versions <= SMALL_SHARE * (stage.memory_bytes - versions + PROCESS_BYTES) for stage, versions in _stages(choice)
    )


def _price(choice: VersionChoice) -> str:
    policy = choice.goal.policy
    largest = max(versions for _, versions in _stages(choice))
    if not largest:
        flying = max(cluster.in_flight for cluster in choice.plan.clusters)
        why = "no backward reads the tables of the other stages" if flying > 1 else "with one microbatch in flight"
        return f'versions "{policy.name}": {why}, no older weights are kept'
    text = f'versions "{policy.name}": older weights take {byte_size(largest)} of a stage at most'
    if not policy.coded:
        return text
    whole = max(versions for _, versions in _stages(choice, DEFAULT_POLICY))
    return f"{text} in 8 bits, instead of {byte_size(whole)}, and the loss stays the same"


def _reason(name: str, found: Mapping[str, VersionChoice]) -> str:
    told = ", ".join(f'{c.plan.predicted_samples_per_second:.1f} with "{n}"' for n, c in found.items())
    stash = found.get(DEFAULT_POLICY)
    if name == DEFAULT_POLICY or (stash is not None and stash.plan.score >= CLOSE * found[name].plan.score):
        return f"{_price(found[name])} (samples/s: {told})"
    short = "the model does not fit" if stash is None else "fewer microbatches can be in flight"
    cost = POLICIES[name].loss_cost
    price = f", at about {cost:g} more loss" if cost else ""
    return f'versions "{name}": with "{DEFAULT_POLICY}" {short}, so {_WORDS[name]}{price} (samples/s: {told})'


_WORDS: Final[Mapping[str, str]] = {
    "double": "there are never more than two versions of the weights, nor more in flight than make an update",
    "stash_8bit": "older weights are kept in 8 bits",
    "recompute": "activations are computed a second time instead of being kept",
    "in_place": "a backward uses the newest weights",
    "latest": "activations are computed a second time, with the newest weights",
}

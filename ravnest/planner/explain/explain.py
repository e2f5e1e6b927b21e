"""Reasons of a plan, as figures and as sentences: its clusters, the limit of each, and changes that would help."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ravnest.planner.cluster import Cluster, memory_bytes
from ravnest.planner.explain.nearby import Case, Figures, figures, listed
from ravnest.planner.explain.what_if import OtherCount, Search, WhatIf, gain_of_using, other_counts, what_ifs
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal
from ravnest.units import byte_size, counted, megabits, milliseconds, sample_rate

ROUGH_PLACES: Final = 48
"""Maximum places of the model for answering questions."""

KINDS: Final = 6
"""Number of standbys that are examined one by one."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reasons of a plan."""

    clusters: tuple[str, ...]
    """For each cluster, a sentence about its rate, its limit, and the differences between its members."""
    sentences: tuple[str, ...]
    """The whole explanation, with the sentences about the clusters."""
    what_ifs: tuple[WhatIf, ...]


_WORTH_SAYING: Final = 0.005


def explain(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    providers: Mapping[str, Provider],
    plan: Proposal,
    search: Search | None = None,
) -> Explanation:
    """The reasons of a plan with at least one cluster.

    With a `search`, new plans are made for other numbers of clusters and better machines (at most six, and none above
    200 providers); without one, plans close to this one are compared.
    """
    case = Case(model, model.coarser(ROUGH_PLACES), goal, network, providers)
    clusters = tuple(
        _cluster(goal, providers, cluster, rate) for cluster, rate in zip(plan.clusters, plan.rates, strict=True)
    )
    changes = what_ifs(case, plan, search)
    sentences = (
        _count(plan, other_counts(case, plan, search)),
        *clusters,
        *_shared(plan),
        *_standing_by(case, plan),
        *_changes(changes),
    )
    return Explanation(clusters, sentences, changes)


def ratio(figures: Sequence[float]) -> float:
    """The largest of these figures against the smallest; 1 if all are equal."""
    return 1.0 if max(figures) == min(figures) else max(figures) / min(figures)


def _count(plan: Proposal, other_counts: Sequence[OtherCount]) -> str:
    count = len(plan.clusters)
    text = f"{counted(count, 'cluster')} for {sample_rate(plan.predicted_samples_per_second)} samples/s"
    others = []
    for other in other_counts:
        worth = f"{other.gain:+.1%}"
        if other.gain < 0 < other.samples_per_second - plan.predicted_samples_per_second:
            worth += ", because of its staler weights"
        others.append(f"with {other.clusters} it would be {sample_rate(other.samples_per_second)} ({worth})")
    if not any(other.clusters > count for other in other_counts):
        others.append("one more cannot be made by splitting one")
    return f"{text}; {'; '.join(others)}."


def _cluster(goal: Goal, providers: Mapping[str, Provider], cluster: Cluster, rate: float) -> str:
    """`rate` is that of the cluster while the others train too."""
    members = [providers[name] for name in cluster.providers]
    text = f"{listed(cluster.providers)}: {sample_rate(rate)} samples/s, limited by {cluster.limit}"
    text += f"; a microbatch every {milliseconds(cluster.period_seconds)}"
    if len(members) > 1:
        seconds = [stage.seconds for stage in cluster.stages]
        lines = [min(p.up_bytes_per_second, p.down_bytes_per_second) for p in members]
        text += (
            f", stages of {milliseconds(min(seconds))} to {milliseconds(max(seconds))}, {cluster.in_flight} in flight, "
            f"so weights change up to {(cluster.in_flight - 1) / goal.accumulate:.3g} times between forward and "
            f"backward at the first stage; speeds differ by {ratio([p.compute_speed for p in members]):.2g}x, lines by "
            f"{ratio(lines):.2g}x"
        )
    if rate < 0.999 * cluster.samples_per_second:
        text += f" (by itself it would make {sample_rate(cluster.samples_per_second)} samples/s)"
    return text + "."


def _shared(plan: Proposal) -> Iterator[str]:
    """Sentences about the clusters together."""
    if plan.limit:
        yield f"Together they are held back by {plan.limit}."
    if plan.averaging_seconds:
        share = 1 - plan.predicted_samples_per_second / (sum(plan.rates) or 1.0)
        slowed = f", which rounds slow down by {share:.1%}" if share > 5e-4 else ""
        yield (
            f"A round of averaging takes {plan.averaging_seconds:.3g} s in the background{slowed}; the percentages "
            "here count rounds as if training waited for them."
        )


def _standing_by(case: Case, plan: Proposal) -> list[str]:
    """Why the standbys have no stage: the first examined ones one by one, and the number of the others."""
    held = memory_bytes(case.model, case.goal, case.goal.in_flight or 1)
    smallest = float(np.min(np.where(case.model.legal, held, np.inf)))
    absent = sum(1 - case.providers[name].reliability for cluster in plan.clusters for name in cluster.providers)
    gains: dict[Figures, float] = {}
    told: list[str] = []
    for name in plan.standbys:
        if len(told) == KINDS:
            break
        provider = case.providers[name]
        if provider.memory_bytes < smallest:
            text = f"has {byte_size(provider.memory_bytes)}, and the smallest stage takes {byte_size(smallest)}"
            told.append(f"{name} stands by: it {text}.")
            continue
        kind = figures(provider)
        if kind not in gains:
            gains[kind] = gain_of_using(case, plan, name)
        told.append(_standby(provider, gains[kind], absent))
    more = len(plan.standbys) - len(told)
    return [*told, f"{more} more stand by."] if more else told


def _standby(provider: Provider, gain: float, absent: float) -> str:
    name = provider.name
    if gain > 1e-6:
        text = f"{name} stands by, though its best use would bring {gain:+.1%}"
        return (
            f"{text}: {absent:.2g} of the providers with a stage are likely to be missing."
            if absent > 1e-9
            else text + "."
        )
    line = min(provider.up_bytes_per_second, provider.down_bytes_per_second)
    has = f"speed {provider.compute_speed:.3g}" + (f" and {megabits(line)} Mbit/s" if np.isfinite(line) else "")
    text = f"{name} stands by: with {has} its best use would bring"
    return f"{text} {'nothing' if gain > -1e-6 else f'{gain:+.1%}'}."


def _changes(changes: Sequence[WhatIf]) -> Iterator[str]:
    for one in changes:
        if one.gain >= _WORTH_SAYING:
            yield f"With {one.change}: {sample_rate(one.samples_per_second)} samples/s ({one.gain:+.1%})."
    idle = [one.change for one in changes if one.gain < _WORTH_SAYING]
    if idle:
        yield f"No more with {listed(idle)}."

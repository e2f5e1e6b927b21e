"""Reasons of a plan, as figures and as sentences: its clusters, the limit of each, and changes that would help."""

from collections.abc import Mapping
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
"""Number of different kinds of standbys that are examined one by one."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Range of a figure over the members of a cluster."""

    least: float
    most: float

    @property
    def ratio(self) -> float:
        """1 if all are equal."""
        return 1.0 if self.most == self.least else self.most / self.least


@dataclass(frozen=True, slots=True)
class ClusterReasons:
    """The rate of a cluster, its limit, and the differences between its members."""

    providers: tuple[str, ...]
    samples_per_second: float
    """While the other clusters train too."""
    alone_samples_per_second: float
    limit: str
    period_seconds: float
    """Time from one microbatch to the next."""
    stage_seconds: Spread
    in_flight: int
    staleness: float
    """Updates of its first stage between forward and backward of a microbatch, with all of them in flight."""
    speed: Spread
    line_bytes_per_second: Spread
    """The lower of the upload and download rates."""

    @property
    def sentence(self) -> str:
        text = f"{listed(self.providers)}: {sample_rate(self.samples_per_second)} samples/s, limited by {self.limit}"
        text += f"; a microbatch every {milliseconds(self.period_seconds)}"
        if len(self.providers) > 1:
            stages = f"{milliseconds(self.stage_seconds.least)} to {milliseconds(self.stage_seconds.most)}"
            text += (
                f", stages of {stages}, {self.in_flight} in flight, so weights change up to {self.staleness:.3g} times "
                f"between forward and backward at the first stage; speeds differ by {self.speed.ratio:.2g}x, "
                f"lines by {self.line_bytes_per_second.ratio:.2g}x"
            )
        if self.samples_per_second < 0.999 * self.alone_samples_per_second:
            text += f" (by itself it would make {sample_rate(self.alone_samples_per_second)} samples/s)"
        return text + "."


@dataclass(frozen=True, slots=True)
class StandbyReason:
    """Why one provider has no stage."""

    provider: str
    kind: str
    """no-room, kept-back, no-gain, or not-looked-at."""
    gain: float | None
    """Relative gain of the score from its best use; None if it was not examined."""
    sentence: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reasons of a plan."""

    predicted_samples_per_second: float
    limit: str
    """The shared resource that limits the clusters; empty if there is none."""
    averaging_seconds: float
    averaging_share: float
    """Share of the rate that averaging in the background costs."""
    clusters: tuple[ClusterReasons, ...]
    standbys: tuple[StandbyReason, ...]
    other_counts: tuple[OtherCount, ...]
    what_ifs: tuple[WhatIf, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """The whole explanation in sentences."""
        text = [self._count(), *(cluster.sentence for cluster in self.clusters)]
        if self.limit:
            text.append(f"Together they are held back by {self.limit}.")
        if self.averaging_seconds:
            slowed = f", which rounds slow down by {self.averaging_share:.1%}" if self.averaging_share > 5e-4 else ""
            text.append(
                f"A round of averaging takes {self.averaging_seconds:.3g} s in the background{slowed}; the percentages "
                "here count rounds as if training waited for them."
            )
        text += self._standing_by()
        helping = [one for one in self.what_ifs if one.gain >= _WORTH_SAYING]
        text += [
            f"With {one.change}: {sample_rate(one.samples_per_second)} samples/s ({one.gain:+.1%})." for one in helping
        ]
        idle = [one.change for one in self.what_ifs if one.gain < _WORTH_SAYING]
        if idle:
            text.append(f"No more with {listed(idle)}.")
        return tuple(text)

    def _standing_by(self) -> list[str]:
        """The first examined standbys one by one, and the number of the others."""
        said = [standby.sentence for standby in self.standbys if standby.kind != "not-looked-at"][:KINDS]
        more = len(self.standbys) - len(said)
        return [*said, f"{more} more stand by."] if more else said

    def _count(self) -> str:
        count = len(self.clusters)
        text = f"{counted(count, 'cluster')} for {sample_rate(self.predicted_samples_per_second)} samples/s"
        others = []
        for other in self.other_counts:
            worth = f"{other.gain:+.1%}"
            if other.gain < 0 < other.samples_per_second - self.predicted_samples_per_second:
                worth += ", because of its staler weights"
            others.append(f"with {other.clusters} it would be {sample_rate(other.samples_per_second)} ({worth})")
        if not any(other.clusters > count for other in self.other_counts):
            others.append("one more cannot be made by splitting one")
        return f"{text}; {'; '.join(others)}."


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
    together = sum(plan.rates)
    return Explanation(
        predicted_samples_per_second=plan.predicted_samples_per_second,
        limit=plan.limit,
        averaging_seconds=plan.averaging_seconds,
        averaging_share=1 - plan.predicted_samples_per_second / together if together else 0.0,
        clusters=tuple(
            _cluster(goal, providers, cluster, rate) for cluster, rate in zip(plan.clusters, plan.rates, strict=True)
        ),
        standbys=_standbys(case, plan),
        other_counts=other_counts(case, plan, search),
        what_ifs=what_ifs(case, plan, search),
    )


def _cluster(goal: Goal, providers: Mapping[str, Provider], cluster: Cluster, rate: float) -> ClusterReasons:
    members = [providers[name] for name in cluster.providers]
    return ClusterReasons(
        providers=cluster.providers,
        samples_per_second=rate,
        alone_samples_per_second=cluster.samples_per_second,
        limit=cluster.limit,
        period_seconds=cluster.period_seconds,
        stage_seconds=_spread([stage.seconds for stage in cluster.stages]),
        in_flight=cluster.in_flight,
        staleness=(cluster.in_flight - 1) / goal.accumulate,
        speed=_spread([p.compute_speed for p in members]),
        line_bytes_per_second=_spread([min(p.up_bytes_per_second, p.down_bytes_per_second) for p in members]),
    )


def _spread(figures: list[float]) -> Spread:
    return Spread(min(figures), max(figures))


def _standbys(case: Case, plan: Proposal) -> tuple[StandbyReason, ...]:
    held = memory_bytes(case.model, case.goal, case.goal.in_flight or 1)
    smallest = float(np.min(np.where(case.model.legal, held, np.inf)))
    absent = sum(1 - case.providers[name].reliability for cluster in plan.clusters for name in cluster.providers)
    gains: dict[Figures, float] = {}
    found = []
    for name in plan.standbys:
        provider = case.providers[name]
        if provider.memory_bytes < smallest:
            text = f"has {byte_size(provider.memory_bytes)}, and the smallest stage takes {byte_size(smallest)}"
            found.append(StandbyReason(name, "no-room", 0.0, f"{name} stands by: it {text}."))
            continue
        kind = figures(provider)
        if kind not in gains:
            if len(gains) >= KINDS:
                text = "its possible gain was not examined"
                found.append(StandbyReason(name, "not-looked-at", None, f"{name} stands by; {text}."))
                continue
            gains[kind] = gain_of_using(case, plan, name)
        found.append(_standby(provider, gains[kind], absent))
    return tuple(found)


def _standby(provider: Provider, gain: float, absent: float) -> StandbyReason:
    name = provider.name
    if gain > 1e-6:
        text = f"{name} stands by, though its best use would bring {gain:+.1%}"
        text += f": {absent:.2g} of the providers with a stage are likely to be missing." if absent > 1e-9 else "."
        return StandbyReason(name, "kept-back", gain, text)
    line = min(provider.up_bytes_per_second, provider.down_bytes_per_second)
    has = f"speed {provider.compute_speed:.3g}" + (f" and {megabits(line)} Mbit/s" if np.isfinite(line) else "")
    text = f"{name} stands by: with {has} its best use would bring"
    return StandbyReason(name, "no-gain", gain, f"{text} {'nothing' if gain > -1e-6 else f'{gain:+.1%}'}.")

"""Who takes a stage whose provider is lost, or what else is to be done: a warm standby, a fit one, a new plan, or none.

A standby that takes the stage as it is lets the others keep theirs; a new cut makes everybody fetch. So a standby that
has the stage at hand takes it even if the cluster is somewhat slower then; one that has to fetch it, only where a new
cut would give no more.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from ravnest.planner.cluster import Cluster
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal
from ravnest.planner.recovery.replan import Lost, Replanned, replan
from ravnest.planner.search.same_cuts import cuts_of, same_cuts
from ravnest.units import sample_rate

WARM_SHARE: Final = 0.8
"""Of the rate before, or of what a new cut would give, that is enough of a standby with the stage at hand: cutting anew
costs more than that until the next machine is lost. An assumption, until recoveries are measured."""

UNHURT_SHARE: Final = 0.95
"""Of the rate before, that is enough of a standby that has to fetch the stage, without looking for anything else."""

Kind = Literal["takes", "reform", "wait"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A standby for a lost stage."""

    name: str
    is_warm: bool
    """Whether it has this very stage at hand."""
    samples_per_second: float | None
    """Of the cluster with it in the place of the lost one; None where its memory does not hold the stage."""


@dataclass(frozen=True, slots=True)
class Recut:
    """What the smallest change of the plan would give, when no standby takes the stage as it is."""

    samples_per_second: float | None
    """Of those who would be left of the cluster; None where nobody can hold the model any more."""
    words: str


@dataclass(frozen=True, slots=True)
class Taking:
    """What is to be done about a lost stage, and why."""

    kind: Kind
    """`takes`: `taker` has the stage as it is. `reform`: the model is cut anew over those who are left, or the cluster
    is dissolved. `wait`: nobody can hold the model now."""
    taker: str | None
    reason: str
    cluster: Cluster | None = None
    """With the taker in it, where one takes the stage."""
    replanned: Replanned | None = None
    """The plan to form, where it is cut anew."""


def choose_taker(lost: str, candidates: Sequence[Candidate], before: float, recut: Recut | None) -> Taking:
    """Who takes the stage of `lost`, in a cluster that had `before` samples a second.

    While no `recut` was looked for, a standby takes the stage only if it leaves the cluster about as fast as it was;
    kind `reform` says then that one has to be looked for. The same arguments always give the same answer.
    """
    fit = [candidate for candidate in candidates if candidate.samples_per_second is not None]
    in_turn = sorted(fit, key=lambda c: (not c.is_warm, -(c.samples_per_second or 0.0), c.name))
    others = recut.samples_per_second if recut is not None else None
    for candidate in in_turn:
        rate = candidate.samples_per_second or 0.0
        at_hand = "has the stage at hand" if candidate.is_warm else "has the memory for the stage, and fetches it"
        what = f"{candidate.name} takes the stage of {lost}: it {at_hand}"
        if rate >= before * (WARM_SHARE if candidate.is_warm else UNHURT_SHARE):
            reason = f"{what}, with {sample_rate(rate)} samples/s ({sample_rate(before)} before)"
            return Taking("takes", candidate.name, reason)
        if recut is None:
            continue
        if others is None:
            reason = f"{what}, with {sample_rate(rate)} samples/s; without it nobody could hold the model"
            return Taking("takes", candidate.name, reason)
        if rate >= others * (WARM_SHARE if candidate.is_warm else 1.0):
            reason = f"{what}, with {sample_rate(rate)} samples/s; a new cut would give {sample_rate(others)}"
            return Taking("takes", candidate.name, reason)
    nobody = _nobody(lost, candidates, in_turn)
    if recut is None:
        return Taking("reform", None, f"{nobody}: what a new cut would give is to be found")
    if others is None:
        return Taking("wait", None, f"{nobody}; {recut.words}")
    return Taking("reform", None, f"{nobody} as well as a new cut, with {sample_rate(others)} samples/s: {recut.words}")


def taker_for(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    providers: Mapping[str, Provider],
    plan: Proposal,
    lost: str,
    standbys: Mapping[str, bool],
    gone: Collection[str] = (),
) -> Taking:
    """Who takes the stage that `lost` has in a plan, and the cluster or the plan with which training goes on.

    `providers` are those before the loss. `standbys` says of each that may take the stage whether it has it at hand;
    one that is not there any more, or takes another stage, is not among them. `gone` are others that were lost at the
    same time. A standby that leaves the cluster about as fast as it was is found without looking at other plans.
    """
    cluster = next(cluster for cluster in plan.clusters if lost in cluster.providers)
    cuts = cuts_of(model, cluster)
    made: dict[str, Cluster] = {}
    candidates = []
    for name in sorted(standbys):
        order = [providers[name if member == lost else member] for member in cluster.providers]
        found = same_cuts(model, goal, network, order, cuts, cluster.in_flight)
        if found is not None:
            made[name] = found
        candidates.append(Candidate(name, standbys[name], found.samples_per_second if found else None))
    taking = choose_taker(lost, candidates, cluster.samples_per_second, None)
    if taking.kind != "takes":
        there = {name: p for name, p in providers.items() if name not in plan.standbys or name in standbys}
        out = sorted({lost, *gone} & there.keys())
        replanned = replan(model, goal, network, there, plan, Lost(tuple(out)))
        taking = choose_taker(lost, candidates, cluster.samples_per_second, _recut(plan, cluster, replanned))
        if taking.kind != "takes":
            return replace(taking, replanned=replanned)
    return replace(taking, cluster=made[taking.taker or ""])


def _recut(plan: Proposal, cluster: Cluster, replanned: Replanned) -> Recut:
    """What the new plan gives in the place of this cluster: what all others do is not for it to take credit for."""
    if not replanned.plan.clusters:
        return Recut(None, replanned.reason)
    others = sum(rate for of, rate in zip(plan.clusters, plan.rates, strict=True) if of != cluster)
    return Recut(max(0.0, replanned.plan.predicted_samples_per_second - others), replanned.reason)


def _nobody(lost: str, candidates: Sequence[Candidate], fit: Sequence[Candidate]) -> str:
    if not candidates:
        return f"nobody stands by to take the stage of {lost}"
    if not fit:
        return f"none of those who stand by has the memory for the stage of {lost}"
    return f"none of those who stand by takes the stage of {lost}"

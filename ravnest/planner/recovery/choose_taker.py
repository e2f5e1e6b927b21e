"""Who takes a stage whose provider is lost, or what else is to be done: a warm standby, a fit one, a new plan, or none.

A standby that takes the stage as it is lets the others keep theirs; a new cut makes everybody fetch. So a standby that
has the stage at hand takes it even if the cluster is somewhat slower then; one that has to fetch it, only where a new
cut would give no more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ravnest.planner.cluster import Cluster
from ravnest.planner.plan import Basis
from ravnest.planner.problem import Provider
from ravnest.planner.search.same_cuts import cuts_of, same_cuts
from ravnest.units import sample_rate

WARM_SHARE: Final = 0.8
"""Of the rate before, or of what a new cut would give, that is enough of a standby with the stage at hand: cutting anew
costs more than that until the next machine is lost. An assumption, until recoveries are measured."""

UNHURT_SHARE: Final = 0.95
"""Of the rate before, that is enough of a standby that has to fetch the stage, without looking for anything else."""

Kind = Literal["takes", "reform", "wait"]


@dataclass(frozen=True, slots=True)
class Candidacy:
    """A provider that may take a lost stage."""

    provider: Provider
    is_warm: bool
    """Whether it has this very stage at hand."""


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
    """What the run would reach with a new plan, when no standby takes the stage as it is."""

    samples_per_second: float | None
    """Beyond the other clusters' rates; None where nobody can hold the model any more."""
    words: str


@dataclass(frozen=True, slots=True)
class Taking:
    """What is to be done about a lost stage, and why."""

    kind: Kind
    """`takes`: `taker` has the stage as it is. `reform`: the model is cut anew over those who are left, or the cluster
    is dissolved. `wait`: nobody can hold the model now."""
    taker: str | None
    reason: str


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


def candidates_for(basis: Basis, cluster: Cluster, lost: str, standbys: Mapping[str, Candidacy]) -> list[Candidate]:
    """What each standby would make of a cluster in the place of `lost`, with the stages cut as they are."""
    cuts = cuts_of(basis.model, cluster)
    found = []
    for name, each in sorted(standbys.items()):
        order = [each.provider if member == lost else basis.providers[member] for member in cluster.providers]
        made = same_cuts(basis.model, basis.goal, basis.network, order, cuts, cluster.in_flight)
        found.append(Candidate(name, each.is_warm, None if made is None else made.samples_per_second))
    return found


def _nobody(lost: str, candidates: Sequence[Candidate], fit: Sequence[Candidate]) -> str:
    if not candidates:
        return f"nobody stands by to take the stage of {lost}"
    if not fit:
        return f"none of those who stand by has the memory for the stage of {lost}"
    return f"none of those who stand by takes the stage of {lost}"

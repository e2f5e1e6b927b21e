"""Replacement of a lost stage: by a warm standby, by one that has the memory for it, by a new plan, or none.

A standby that takes over the stage lets the other providers keep theirs, whereas with a new cut they all fetch. So a
warm standby takes over even if the cluster becomes somewhat slower, and one that has to fetch the stage only if a new
cut would not be faster.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ravnest.planner.cluster import Cluster
from ravnest.planner.plan import Basis
from ravnest.planner.problem import Provider
from ravnest.planner.search.fixed_layout import cuts_of, same_cuts
from ravnest.units import sample_rate

WARM_SHARE: Final = 0.8
"""Share of the rate before, or of the rate with a new cut, that is enough for a warm standby: a new cut costs more than
the rest until the next loss. An assumption, until recoveries are measured."""

UNHURT_SHARE: Final = 0.95
"""Share of the rate before that is enough for a standby that has to fetch the stage, without a search for a new cut."""

Kind = Literal["takes", "reform", "wait"]


@dataclass(frozen=True, slots=True)
class Candidacy:
    """A provider that may take a lost stage."""

    provider: Provider
    is_warm: bool
    """Whether it has fetched this stage already."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A standby for a lost stage, with the rate of the cluster that takes it in."""

    name: str
    is_warm: bool
    """Whether it has fetched this stage already."""
    samples_per_second: float | None
    """Rate of the cluster with it in place of the lost provider; None if its memory does not hold the stage."""


@dataclass(frozen=True, slots=True)
class Recut:
    """The alternative of a new plan."""

    samples_per_second: float | None
    """Rate in addition to the other clusters; None if the remaining providers cannot hold the model."""
    words: str


@dataclass(frozen=True, slots=True)
class Taking:
    """The decision about a lost stage, and why."""

    kind: Kind
    """`takes`: `taker` takes over the stage. `reform`: the model is cut again for the remaining providers, or the
    cluster is dissolved. `wait`: the remaining providers cannot hold the model."""
    taker: str | None
    reason: str


def choose_taker(lost: str, candidates: Sequence[Candidate], before: float, recut: Recut | None) -> Taking:
    """The replacement for the stage of `lost`, in a cluster that had `before` samples per second.

    Without a `recut`, a standby takes over only if the cluster stays about as fast as it was; the kind `reform` then
    asks for a search for one. The same arguments always give the same answer.
    """
    fit = [candidate for candidate in candidates if candidate.samples_per_second is not None]
    in_turn = sorted(fit, key=lambda c: (not c.is_warm, -(c.samples_per_second or 0.0), c.name))
    others = recut.samples_per_second if recut is not None else None
    for candidate in in_turn:
        rate = candidate.samples_per_second or 0.0
        state = "is warm for the stage" if candidate.is_warm else "has the memory for the stage, and fetches it"
        what = f"{candidate.name} takes over the stage of {lost}: it {state}"
        if rate >= before * (WARM_SHARE if candidate.is_warm else UNHURT_SHARE):
            reason = f"{what}, with {sample_rate(rate)} samples/s ({sample_rate(before)} before)"
            return Taking("takes", candidate.name, reason)
        if recut is None:
            continue
        if others is None:
            reason = f"{what}, with {sample_rate(rate)} samples/s; without it, the model would not fit"
            return Taking("takes", candidate.name, reason)
        if rate >= others * (WARM_SHARE if candidate.is_warm else 1.0):
            reason = f"{what}, with {sample_rate(rate)} samples/s; a new cut would give {sample_rate(others)}"
            return Taking("takes", candidate.name, reason)
    why_none = _why_none(lost, candidates, in_turn)
    if recut is None:
        return Taking("reform", None, f"{why_none}: the rate of a new cut is to be found")
    if others is None:
        return Taking("wait", None, f"{why_none}; {recut.words}")
    return Taking("reform", None, f"{why_none}; a new cut gives {sample_rate(others)} samples/s: {recut.words}")


def candidates_for(basis: Basis, cluster: Cluster, lost: str, standbys: Mapping[str, Candidacy]) -> list[Candidate]:
    """For each standby, the cluster with it in place of `lost` and unchanged cuts."""
    cuts = cuts_of(basis.model, cluster)
    found = []
    for name, each in sorted(standbys.items()):
        order = [each.provider if member == lost else basis.providers[member] for member in cluster.providers]
        made = same_cuts(basis.model, basis.goal, basis.network, order, cuts, cluster.in_flight)
        found.append(Candidate(name, each.is_warm, None if made is None else made.samples_per_second))
    return found


def _why_none(lost: str, candidates: Sequence[Candidate], fit: Sequence[Candidate]) -> str:
    if not candidates:
        return f"there is no standby for the stage of {lost}"
    if not fit:
        return f"no standby has the memory for the stage of {lost}"
    return f"no standby takes over the stage of {lost} without a loss of rate"

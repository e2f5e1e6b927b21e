"""What to do when a machine is lost, joins or slows down: the smallest change that restores the most throughput.

Every option is a whole plan with what must be fetched for it. It is worth what all clusters train on until a horizon,
where a cluster that changes stands still until its members have what they need; those that do not change go on. So a
change that is small and good enough wins over one that is better and moves much. The reason comes with the choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ravnest.planner.cluster import Cluster
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal, proposal_of
from ravnest.planner.recovery.moving import Fetch, Piece, fetches, held_pieces, moving_seconds
from ravnest.planner.recovery.repairs import Case, Step, improvements, listed, repairs
from ravnest.planner.search.cuts import best_cuts
from ravnest.units import byte_size, sample_rate

HORIZON_SECONDS: Final = 600.0
"""Over which a change must pay. On home PCs the next change comes soon enough."""

DEPLOY_SECONDS: Final = 2.0
"""For which a cluster that changes stands still even where nothing is fetched: stopping, deploying, filling it again.
An assumption, until recoveries are measured."""

ROUNDS: Final = 6
"""How many steps an option has at most after the repairs."""

SHOWN: Final = 5
"""How many of the options that were not chosen are handed back."""

ROUGH_PLACES: Final = 48
"""Of a model with more places than these, options are cut at so many of them; the one that is chosen, at all."""


@dataclass(frozen=True, slots=True)
class Lost:
    """These are gone."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """These are here now, and hold nothing yet; one that comes back was lost before."""

    providers: tuple[Provider, ...]


@dataclass(frozen=True, slots=True)
class Slowed:
    """This one, as it is now: slower or faster, with another line, or with other memory."""

    provider: Provider


Change = Lost | Joined | Slowed


@dataclass(frozen=True, slots=True)
class Option:
    """One way to go on: its plan, what must be fetched for it, and what it is worth."""

    plan: Proposal
    steps: tuple[str, ...]
    """What is done, in words; none where nothing is."""
    fetches: tuple[Fetch, ...]
    moving_seconds: float
    """Until the last cluster that changes is at work."""
    samples: float
    """Trained on until the horizon, less what staleness beyond the bound takes."""

    @property
    def moved_bytes(self) -> float:
        return sum(move.bytes_to_move for move in self.fetches)


@dataclass(frozen=True, slots=True)
class Replanned:
    """The way to go on, and why."""

    chosen: Option
    unchanged: Option
    """What would be without it: the clusters that can go on as they are do."""
    others: tuple[Option, ...]
    """The best of those that were not chosen, best first."""
    providers: Mapping[str, Provider]
    """Who is there after the change."""
    reason: str

    @property
    def plan(self) -> Proposal:
        return self.chosen.plan

    @property
    def gained_samples(self) -> float:
        """Until the horizon, over what would be without it."""
        return self.chosen.samples - self.unchanged.samples


def replan(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    providers: Mapping[str, Provider],
    plan: Proposal,
    change: Change,
    *,
    horizon_seconds: float = HORIZON_SECONDS,
    spares: int = 0,
) -> Replanned:
    """How a plan that is running goes on after a change; a plan without clusters where nobody can hold the model.

    `providers` are those before the change. Who stood by before it stays so, unless a cluster is broken, somebody has
    slowed down, or newcomers are too few for a cluster of their own; at least `spares` of them are kept back then too,
    where nothing is broken. The same arguments always give the same answer.
    """
    now = _after(providers, change)
    weak = frozenset([change.provider.name]) if isinstance(change, Slowed) else frozenset[str]()
    case = Case(model, model.coarser(ROUGH_PLACES), goal, network, now)
    going_on, broken = _parted(case, plan, weak)
    scales = _Scales(case, held_pieces(plan.clusters), frozenset(map(_shape, going_on)), horizon_seconds)
    unchanged = best = scales.weighed((), going_on)
    seen = [unchanged]
    gone = frozenset(providers) - frozenset(now)
    to_mend = broken + [cluster for cluster in going_on if not weak.isdisjoint(cluster.providers)]
    to_mend.sort(key=lambda cluster: (-cluster.samples_per_second, cluster.providers))
    # Of several broken clusters the one that is mended first has the choice of helpers.
    for turn in (to_mend, to_mend[::-1]) if len(to_mend) > 1 else (to_mend,):
        mended = unchanged
        for cluster in turn:
            found = [scales.after(mended, step) for step in _ways(case, mended.plan, cluster, gone, weak)]
            if cluster in going_on:
                found = [option for option in found if _leaves(option, mended, spares)]
            seen += found
            mended = _choice(mended, found)
        best = max([best, mended], key=_preference)
    spare = plan.standbys if isinstance(change, Joined) else ()
    for _ in range(ROUNDS):
        free = [name for name in best.plan.standbys if name not in plan.standbys or name in weak]
        steps = improvements(case, best.plan, free, [name for name in spare if name in best.plan.standbys])
        found = [option for step in steps if _leaves(option := scales.after(best, step), best, spares)]
        seen += found
        better = _choice(best, found)
        if better is best:
            break
        best = better
    best = scales.polished(best)
    others = _others(seen, best)
    reason = _reason(change, plan, unchanged, best, others, horizon_seconds)
    return Replanned(best, unchanged, others, now, reason)


_CLOSE: Final = 1e-6

_NEARLY: Final = 0.99
"""A step that gains this share of what the best one does is as good, if it moves less."""


def _choice(base: Option, found: Sequence[Option]) -> Option:
    """The one that moves least of those that gain nearly the most; `base` where none gains anything."""
    most = max((option.samples for option in found), default=0.0)
    if most <= base.samples * (1 + _CLOSE):
        return base
    enough = base.samples + _NEARLY * (most - base.samples)
    good = [option for option in found if option.samples >= enough]
    return min(good, key=lambda option: (option.moved_bytes, len(option.steps), -option.samples))


def _preference(option: Option) -> tuple[float, float, int]:
    """The most samples; of those the fewest bytes to move, then the fewest steps."""
    return option.samples, -option.moved_bytes, -len(option.steps)


def _ways(case: Case, plan: Proposal, cluster: Cluster, gone: frozenset[str], weak: frozenset[str]) -> list[Step]:
    """With those who are still there, and without the weak ones as well."""
    found = list(repairs(case, plan, cluster, gone))
    if not weak.isdisjoint(cluster.providers):
        found += repairs(case, plan, cluster, gone | weak)
    if not found and len(case.rough.places) < len(case.model.places):
        # Memory may be so tight that only few places will do.
        return _ways(replace(case, rough=case.model), plan, cluster, gone, weak)
    return found


def _leaves(option: Option, before: Option, spares: int) -> bool:
    return len(option.plan.standbys) >= min(spares, len(before.plan.standbys))


def _others(seen: Sequence[Option], best: Option) -> tuple[Option, ...]:
    """The best of those that lead to different clusters, each once."""
    found: dict[frozenset[_Shape], Option] = {}
    for option in sorted((o for o in seen if o.steps != best.steps), key=_preference, reverse=True):
        found.setdefault(frozenset(map(_shape, option.plan.clusters)), option)
    found.pop(frozenset(map(_shape, best.plan.clusters)), None)
    return tuple(found.values())[:SHOWN]


def _after(providers: Mapping[str, Provider], change: Change) -> dict[str, Provider]:
    match change:
        case Lost(names):
            return {name: provider for name, provider in providers.items() if name not in names}
        case Joined(newcomers):
            return {**providers, **{provider.name: provider for provider in newcomers}}
        case Slowed(provider):
            return {**providers, provider.name: provider}


def _parted(case: Case, plan: Proposal, weak: frozenset[str]) -> tuple[list[Cluster], list[Cluster]]:
    """The clusters that can go on as they are, with what they do now, and those that cannot."""
    going_on, broken = [], []
    for cluster in plan.clusters:
        if any(name not in case.providers for name in cluster.providers):
            broken.append(cluster)
        elif weak.isdisjoint(cluster.providers):
            going_on.append(cluster)
        else:
            now = case.cut_alike(case.named(cluster.providers), cluster)
            if now is None:
                broken.append(cluster)
            else:
                going_on.append(now)
    return going_on, broken


_Shape = tuple[tuple[str, int, int], ...]


def _shape(cluster: Cluster) -> _Shape:
    return tuple((stage.provider, stage.start, stage.end) for stage in cluster.stages)


@dataclass(frozen=True, slots=True)
class _Scales:
    """What an option is worth."""

    case: Case
    held: Mapping[str, Piece]
    running: frozenset[_Shape]
    horizon_seconds: float

    def after(self, option: Option, step: Step) -> Option:
        clusters = [cluster for cluster in option.plan.clusters if cluster not in step.removed]
        return self.weighed((*option.steps, step.words), [*clusters, *step.added])

    def polished(self, option: Option) -> Option:
        """The same with its new clusters cut at the best of all places, where that is worth what it moves."""
        case = self.case
        if len(case.rough.places) == len(case.model.places):
            return option
        for cluster in option.plan.clusters:
            if _shape(cluster) not in self.running:
                exact = best_cuts(case.model, case.goal, case.network, case.named(cluster.providers))
                if exact is not None:
                    others = [c for c in option.plan.clusters if c != cluster]
                    option = max([option, self.weighed(option.steps, [*others, exact])], key=_preference)
        return option

    def weighed(self, steps: tuple[str, ...], clusters: Sequence[Cluster]) -> Option:
        """Each cluster trains at its rate beside the others from when it is at work until the horizon."""
        case = self.case
        plan = proposal_of(case.goal, case.network, case.providers, clusters)
        worth = sum(
            rate * case.goal.worth(cluster.needed_in_flight)
            for cluster, rate in zip(plan.clusters, plan.rates, strict=True)
        )
        kept = plan.score / worth if worth else 0.0
        samples = longest = 0.0
        moves: list[Fetch] = []
        for cluster, rate in zip(plan.clusters, plan.rates, strict=True):
            still = 0.0
            if _shape(cluster) not in self.running:
                mine = fetches(case.model, self.held, cluster)
                still = DEPLOY_SECONDS + moving_seconds(mine, case.providers)
                moves += mine
            longest = max(longest, still)
            at_work = max(0.0, self.horizon_seconds - still)
            samples += rate * kept * case.goal.worth(cluster.needed_in_flight) * at_work
        return Option(plan, steps, tuple(moves), longest, samples)


def _reason(
    change: Change, before: Proposal, unchanged: Option, best: Option, others: Sequence[Option], horizon_seconds: float
) -> str:
    rate = best.plan.predicted_samples_per_second
    without = unchanged.plan.predicted_samples_per_second
    was = f"{sample_rate(before.predicted_samples_per_second)} before"
    if not best.plan.clusters:
        return f"{_happened(change)}, and those who are left cannot hold the model: training waits for more machines"
    if not best.steps:
        stays = f"the plan stays as it is, with {sample_rate(rate)} samples/s ({was})"
        if isinstance(change, Joined):
            names = [provider.name for provider in change.providers]
            stays += f", and {listed(names)} {'stands' if len(names) == 1 else 'stand'} by"
        return f"{_happened(change)}: {stays}; no change pays within {horizon_seconds:.0f} s"
    fetched = f"{byte_size(best.moved_bytes)} are fetched" if best.moved_bytes else "Nothing is fetched"
    text = (
        f"{_happened(change)}: {'; then '.join(best.steps)}. {fetched}; in {best.moving_seconds:.3g} s all is at work, "
        f"with {sample_rate(rate)} samples/s instead of {sample_rate(without)} ({was})"
    )
    if others and best.samples > 0 and others[0].steps:
        less = 1 - others[0].samples / best.samples
        text += f"; next best, by {less:.1%} less in {horizon_seconds:.0f} s: {'; then '.join(others[0].steps)}"
    return text


def _happened(change: Change) -> str:
    match change:
        case Lost(names):
            return f"{listed(names)} {'is' if len(names) == 1 else 'are'} lost"
        case Joined(newcomers):
            names = tuple(provider.name for provider in newcomers)
            return f"{listed(names)} {'has' if len(names) == 1 else 'have'} joined"
        case Slowed(provider):
            return f"{provider.name} is not as it was"

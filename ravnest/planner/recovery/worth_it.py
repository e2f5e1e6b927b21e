"""Decision whether another plan replaces the running one: its gain against the cost of the change.

Both plans come from the same search. Deploying another plan stops all clusters until every provider has what it needs
of its stage, so the other plan is worth its rate over the rest of the horizon, and must gain enough over the running
plan to justify the standstill. The judgement carries the figures and the reason as text.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ravnest.planner.cluster import Cluster
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.plan import Plan
from ravnest.planner.problem import Provider
from ravnest.planner.proposal import proposal_of
from ravnest.units import byte_size, sample_rate

HORIZON_SECONDS: Final = 600.0
"""Time within which a change must pay. On home PCs the next change comes soon enough."""

DEPLOY_SECONDS: Final = 2.0
"""Standstill of a change that fetches nothing: stopping, deploying, filling the pipeline again. An assumption, until
recoveries are measured."""

MIN_GAIN: Final = 0.1
"""Share of samples that must be gained over the horizon: a few per cent do not justify a standstill."""

Piece = tuple[int, int]
"""From one place of the model to another, as `split` counts them."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether another plan is worth its standstill, and why."""

    is_worth_it: bool
    gain: float
    """Share of samples gained over the horizon; below 0 where there is a loss."""
    reason: str


def worth_it(running: Plan, clusters: Collection[int], plan: Plan) -> Judgement:
    """Whether `plan` takes the place of these clusters of a running plan."""
    basis = plan.basis
    providers = {**running.basis.providers, **basis.providers}
    train = [running.clusters[number].cost for number in clusters]
    before = proposal_of(basis.goal, basis.network, providers, train)
    after = [cluster.cost for cluster in plan.clusters]
    held = held_pieces(train)
    if held_pieces(after) == held:
        return Judgement(False, 0.0, f"the plan stays as it is, with {_rate(before.score)}")
    sizes = {name: size for cluster in after for name, size in fetched_bytes(basis.model, held, cluster).items()}
    standstill = DEPLOY_SECONDS + fetch_seconds(sizes, providers)
    samples = plan.score * max(0.0, HORIZON_SECONDS - standstill)
    gain = samples / (before.score * HORIZON_SECONDS) - 1 if before.score else 1.0
    moved = sum(sizes.values())
    fetched = f"{byte_size(moved)} are fetched" if moved else "nothing is fetched"
    reason = (
        f"{_rate(plan.steady_samples_per_second)} instead of {_rate(before.predicted_samples_per_second)}; {fetched}, "
        f"which takes {standstill:.3g} s: {gain:+.0%} samples in {HORIZON_SECONDS:.0f} s"
    )
    if gain < MIN_GAIN:
        return Judgement(False, gain, f"{reason}, which is not worth standing still for")
    return Judgement(True, gain, reason)


def held_pieces(clusters: Iterable[Cluster]) -> dict[str, Piece]:
    """The piece of the model that each provider of these clusters holds."""
    return {stage.provider: (stage.start, stage.end) for cluster in clusters for stage in cluster.stages}


def fetched_bytes(model: ModelCosts, held: Mapping[str, Piece], cluster: Cluster) -> dict[str, float]:
    """Bytes that each provider of a cluster fetches, given the pieces that providers hold already: parameters, and
    their optimizer state."""
    index = {place: i for i, place in enumerate(model.places)}
    sizes = {}
    for stage in cluster.stages:
        missing = _missing((stage.start, stage.end), held.get(stage.provider))
        size = sum(float(model.parameter_bytes[index[b]] - model.parameter_bytes[index[a]]) for a, b in missing)
        sizes[stage.provider] = size * (1.0 + model.state_bytes_per_byte)
    return sizes


def fetch_seconds(sizes: Mapping[str, float], providers: Mapping[str, Provider]) -> float:
    """Time until the last provider has fetched its part, all at the same time and each over its own line."""
    return max((size / providers[name].down_bytes_per_second for name, size in sizes.items()), default=0.0)


def _missing(wanted: Piece, held: Piece | None) -> list[Piece]:
    if held is None or held[1] <= wanted[0] or wanted[1] <= held[0]:
        return [wanted]
    pieces = [(wanted[0], held[0]), (held[1], wanted[1])]
    return [(start, end) for start, end in pieces if start < end]


def _rate(samples_per_second: float) -> str:
    return f"{sample_rate(samples_per_second)} samples/s"

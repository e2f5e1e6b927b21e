"""A made-up model and plans of it, for what shows plans."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ravnest.planner.cluster import cluster_of
from ravnest.planner.explain.explain import explain
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Line, Network, Provider, Requester
from ravnest.planner.proposal import proposal_of
from ravnest.planner.recovery.state_periods import planned_periods
from ravnest.planner.rings.rings import rings_of
from ravnest.preview.dry_run import DryRun
from ravnest.preview.module_names import Parts
from tests.builders import plan_of_proposal

LAYERS = 60


def model() -> ModelCosts:
    """Layers in a row, each with one parameter of a million numbers and 10 ms of work."""
    places = np.arange(LAYERS + 1, dtype=float)
    crossing = np.full(LAYERS + 1, 1e6)
    crossing[[0, -1]] = 0
    return ModelCosts(
        places=tuple(range(LAYERS + 1)),
        heavy_seconds=places * 0.008,
        light_seconds=places * 0.002,
        heavy_forward_seconds=places * 0.003,
        light_forward_seconds=places * 0.001,
        parameter_bytes=places * 4e6,
        parameters=places,
        saved_bytes=places * 2e6,
        forward_bytes=crossing,
        backward_bytes=crossing,
        input_bytes=(1e5, 100.0),
        input_uses=np.stack([np.minimum(places, 1), np.maximum(places - LAYERS + 1, 0)]),
        samples=32,
    )


def parts() -> Parts:
    names = [f"blocks.{i}.weight" for i in range(LAYERS)]
    return Parts(range(LAYERS), names, [i * 1_000_000 for i in range(LAYERS + 1)])


def machines(*names: str, **more: float) -> list[Provider]:
    return [
        Provider(
            name=name,
            memory_bytes=8 << 30,
            compute_speed=1 + i % 3,
            up_bytes_per_second=5e6,
            down_bytes_per_second=12.5e6,
            latency_seconds=0.012,
            **more,  # type: ignore[arg-type]
        )
        for i, name in enumerate(names)
    ]


def dry_run_of(
    clusters: Sequence[Sequence[Provider]],
    standbys: Sequence[Provider] = (),
    network: Network | None = None,
    goal: Goal | None = None,
    in_flight: int = 5,
    explained: bool = False,
    rows_bytes: float = 0.0,
) -> DryRun:
    """The plan with these clusters, each cut into stages of about as many layers."""
    costs = replace(model(), rows_bytes=rows_bytes)
    goal, network = goal or Goal(), network or Network({}, Requester("", 5e6, 12.5e6))
    everyone = {p.name: p for p in (*(p for cluster in clusters for p in cluster), *standbys)}
    made = []
    for members in clusters:
        cuts = [round(LAYERS * k / len(members)) for k in range(1, len(members))]
        made.append(cluster_of(costs, goal, network, members, cuts, in_flight))
    plan = proposal_of(goal, network, everyone, made)
    rings = rings_of(plan, costs, network, everyone) if len(clusters) > 1 else ()
    explanation = explain(costs, goal, network, everyone, plan) if explained else None
    whole = plan_of_proposal(plan, costs, goal, network, everyone)
    state = planned_periods(made, costs, everyone, network.requester, 60.0)
    return DryRun("made-up", whole, parts(), rings, explanation, state, {"anna": "RTX 3060"})


def fast_line() -> dict[tuple[str, str], Line]:
    return {("anna", "ben"): Line(125e6, 0.0005), ("ben", "anna"): Line(125e6, 0.0005)}

"""A plan as it was, with whoever is there."""

import pytest

from ravnest.errors import PlanError
from ravnest.planner.problem import Goal, Network
from ravnest.planner.search.fixed_layout import ClusterLayout, filled, laid_out
from tests.preview.planned import machines, model

LAYOUTS = (ClusterLayout(("ben", "anna"), (20,), 4), ClusterLayout(("dora", "carl"), (45,), 6))


def test_clusters_lie_as_they_did() -> None:
    providers = {p.name: p for p in machines("anna", "ben", "carl", "dora", "emil")}
    plan = laid_out(model(), Goal(), Network(), providers, LAYOUTS)
    assert [cluster.providers for cluster in plan.clusters] == [("ben", "anna"), ("dora", "carl")]
    assert [[stage.start for stage in cluster.stages] for cluster in plan.clusters] == [[0, 20], [0, 45]]
    assert plan.standbys == ("emil",)


def test_others_take_the_place_of_those_who_are_absent() -> None:
    assert filled(LAYOUTS, {"anna", "ben", "carl", "dora"}) == LAYOUTS
    found = filled(LAYOUTS, {"ben", "emil", "dora", "carl", "fred"})
    assert found is not None and [each.providers for each in found] == [("ben", "emil"), ("dora", "carl")]
    assert filled(LAYOUTS, {"anna", "ben", "carl"}) is None


def test_what_cannot_be_any_more_is_told() -> None:
    providers = {p.name: p for p in machines("anna", "ben", "carl", "dora")}
    with pytest.raises(PlanError, match="dora held a stage and is not present"):
        laid_out(model(), Goal(), Network(), {n: p for n, p in providers.items() if n != "dora"}, LAYOUTS)
    with pytest.raises(PlanError, match="can no longer be cut where it was"):
        laid_out(model(), Goal(), Network(), providers, [ClusterLayout(("anna", "ben"), (1000,), 2)])
    small = {p.name: p for p in machines("anna", "ben")}
    tiny = {name: type(p)(name=name, memory_bytes=1) for name, p in small.items()}
    with pytest.raises(PlanError, match="no longer fit into their memory"):
        laid_out(model(), Goal(), Network(), tiny, LAYOUTS[:1])

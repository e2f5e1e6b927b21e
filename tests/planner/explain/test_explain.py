"""A plan comes with its reasons: what limits it, who stands by and why, and what would bring more."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ravnest.errors import PlanError
from ravnest.planner.cluster import Cluster
from ravnest.planner.explain.explain import Explanation, explain
from ravnest.planner.explain.what_if import Search
from ravnest.planner.problem import Goal, Network, Provider, Requester
from ravnest.planner.proposal import Proposal, proposal_of
from tests.planner.best_clusters import best_clusters
from tests.planner.made_up import machine, model, named, planned

GOAL = Goal()
NETWORK = Network()
COSTS = model(12)


def best_plan(goal: Goal, network: Network, providers: Sequence[Provider]) -> Proposal:
    """Of all partitions of few providers."""
    clusters = best_clusters(COSTS, goal, network, providers)
    everybody = {provider.name: provider for provider in providers}
    plans = [
        proposal_of(goal, network, everybody, chosen)
        for chosen in _partitions(clusters, (1 << len(providers)) - 1)
        if chosen and len(chosen) <= (goal.max_clusters or len(chosen))
    ]
    if not plans:
        raise PlanError("The model fits nowhere.")
    return max(plans, key=lambda plan: plan.score)


def _partitions(clusters: dict[int, Cluster], free: int) -> list[list[Cluster]]:
    if not free:
        return [[]]
    lowest = free & -free
    found = _partitions(clusters, free ^ lowest)
    for members, cluster in clusters.items():
        if members & lowest and members & free == members:
            found = found + [[cluster, *rest] for rest in _partitions(clusters, free ^ members)]
    return found


def explained(
    providers: dict[str, Provider],
    *clusters: Sequence[str],
    search: Search | None = None,
    network: Network = NETWORK,
    goal: Goal = GOAL,
) -> Explanation:
    plan = planned(COSTS, goal, network, providers, *clusters)
    return explain(COSTS, goal, network, providers, plan, search)


def gain(found: Explanation, change: str) -> float:
    (one,) = [one.gain for one in found.what_ifs if one.change.startswith(change)]
    return one


def test_each_cluster_says_what_limits_it_and_how_alike_its_members_are() -> None:
    nodes = named(machine("ann", 1.0), machine("bob", 2.0, mbps=50), machine("cat", 4.0))
    found = explained(nodes, ["ann", "bob"], ["cat"])
    first, second = found.clusters
    assert first.startswith("ann and bob: ") and "limited by the computation of" in first
    assert "speeds differ by 2x, lines by 2x" in first and "in flight, so weights change up to" in first
    assert second.startswith("cat: ") and "in flight" not in second
    assert found.sentences[1:3] == found.clusters


def test_a_slow_line_is_named_and_a_faster_one_would_help_where_more_memory_would_not() -> None:
    nodes = named(machine("ann", 1.0, mbps=5), machine("bob", 1.0))
    found = explained(nodes, ["ann", "bob"])
    assert "limited by what ann can" in found.clusters[0]
    assert gain(found, "twice the line of ann") > 0.5
    assert gain(found, "twice the memory") == 0 and gain(found, "twice the speed") == 0
    assert any(text.startswith("With twice the line of ann") for text in found.sentences)
    assert any(text.startswith("No more with") and "twice the memory" in text for text in found.sentences)


def test_more_memory_helps_where_too_few_fit_in_flight() -> None:
    nodes = named(*(machine(name, 1.0, memory=1.3e8, latency=0.1) for name in ("ann", "bob", "cat")))
    found = explained(nodes, ["ann", "bob", "cat"])
    assert "in flight on a round trip" in found.clusters[0]
    assert gain(found, "twice the memory") > 0.02 and gain(found, "twice the line") < gain(found, "twice the memory")


def test_one_more_machine_like_the_fastest_brings_more_than_one_like_the_middle_one() -> None:
    nodes = named(machine("ann", 1.0), machine("bob", 1.0), machine("cat", 3.0))
    found = explained(nodes, ["ann", "bob", "cat"])
    fast, middle = gain(found, "one more machine like cat"), gain(found, "one more machine like ann")
    assert fast > middle >= 0


def test_the_number_of_clusters_is_compared_with_one_more_and_one_fewer() -> None:
    nodes = named(*(machine(name, 1.0, mbps=1000) for name in ("ann", "bob", "cat", "dan")))
    plan = best_plan(GOAL, NETWORK, list(nodes.values()))
    found = explain(COSTS, GOAL, NETWORK, nodes, plan, best_plan)
    count = len(plan.clusters)
    assert f"with {count - 1} it would be" in found.sentences[0] and "(+" not in found.sentences[0]
    assert f"with {count + 1}" not in found.sentences[0]
    two = explained(nodes, ["ann", "bob"], ["cat", "dan"], search=best_plan)
    assert "with 1 it would be" in two.sentences[0] and "with 3 it would be" in two.sentences[0]


def test_a_search_finds_more_than_a_step_from_the_plan() -> None:
    # One large cluster, where two would do better: a step does not part it, a search does.
    nodes = named(*(machine(name, 1.0, mbps=1000, latency=0.2) for name in ("ann", "bob", "cat", "dan")))
    order = ["ann", "bob", "cat", "dan"]
    near, far = explained(nodes, order), explained(nodes, order, search=best_plan)
    for one, other in zip(sorted(near.what_ifs, key=_name), sorted(far.what_ifs, key=_name), strict=True):
        assert other.gain >= one.gain - 1e-9
    assert max(one.gain for one in far.what_ifs) > max(one.gain for one in near.what_ifs)


def _name(one: object) -> str:
    return str(getattr(one, "change")).split(" of ")[0]  # noqa: B009


def test_a_standby_says_why_it_is_one() -> None:
    nodes = named(
        machine("ann", 1.0, reliability=0.8),
        machine("bob", 1.0, reliability=0.8),
        machine("good", 1.0),
        machine("slow", 0.01, mbps=1),
        machine("small", 1.0, memory=1000),
    )
    good, slow, small = (
        next(text for text in explained(nodes, ["ann", "bob"]).sentences if text.startswith(f"{name} stands by"))
        for name in ("good", "slow", "small")
    )
    assert "would bring +" in good and "0.4 of the providers with a stage are likely to be missing" in good
    assert "1 Mbit/s its best use would bring -" in slow
    assert "the smallest stage takes" in small


def test_what_they_share_is_named_and_so_is_what_averaging_takes() -> None:
    nodes = named(machine("ann", 1.0), machine("bob", 1.0))
    narrow = Network(requester=Requester(up_bytes_per_second=10e3, down_bytes_per_second=10e3))
    found = explained(nodes, ["ann"], ["bob"], network=narrow)
    assert any(text.startswith("Together they are held back by the requester's uplink: ") for text in found.sentences)
    assert gain(found, "twice the requester's line") > 0.3
    assert "(by itself it would make" in found.clusters[0]
    assert any("A round of averaging takes" in text for text in found.sentences)
    assert not any("which rounds slow down" in text for text in found.sentences)
    assert not any("rounds of averaging" in one.change for one in found.what_ifs)


def test_rounds_that_take_more_than_a_line_carries_are_said_to_cost() -> None:
    nodes = named(machine("ann", 1.0), machine("bob", 1.0))
    found = explained(nodes, ["ann"], ["bob"], goal=Goal(average_every=10))
    assert gain(found, "half as many rounds of averaging") > 0
    assert any("which rounds slow down by" in text for text in found.sentences)


def test_reasons_are_the_same_every_time() -> None:
    nodes = named(machine("ann", 1.0), machine("bob", 2.0), machine("cat", 1.0))
    found = explained(nodes, ["ann", "bob"])
    assert found == explained(nodes, ["ann", "bob"])


def test_a_large_swarm_is_explained_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ravnest.planner.explain.what_if.SEARCHED", 20)
    nodes = named(*(machine(f"n{i:03}", 1.0 + i % 7) for i in range(24)))
    names = sorted(nodes, key=lambda name: nodes[name].compute_speed)
    plan = planned(COSTS, GOAL, NETWORK, nodes, *(names[i : i + 4] for i in range(0, 20, 4)))

    def never(*_: object) -> Proposal:
        raise AssertionError("This is too much to search for.")

    found = explain(COSTS, GOAL, NETWORK, nodes, plan, never)
    assert len(found.clusters) == 5 and found.what_ifs
    assert sum(" stands by" in text for text in found.sentences) == 4


def test_of_very_many_who_stand_by_a_few_are_looked_at_and_the_others_are_counted() -> None:
    nodes = named(machine("ann", 4.0), *(machine(f"n{i:02}", 0.01 * (i + 1), mbps=1) for i in range(30)))
    found = explained(nodes, ["ann"])
    assert sum(" stands by: with speed" in text for text in found.sentences) == 6
    assert "24 more stand by." in found.sentences


def test_a_search_that_finds_nothing_is_no_failure() -> None:
    nodes = named(machine("ann", 1.0), machine("bob", 2.0))

    def nothing(*_: object) -> Proposal:
        raise PlanError("The model fits nowhere.")

    plan = planned(COSTS, GOAL, NETWORK, nodes, ["ann", "bob"])
    assert explain(COSTS, GOAL, NETWORK, nodes, plan, nothing) == explain(COSTS, GOAL, NETWORK, nodes, plan)
    alone = explain(COSTS, replace(GOAL, max_clusters=1), NETWORK, nodes, plan)
    assert "it would be" not in alone.sentences[0]

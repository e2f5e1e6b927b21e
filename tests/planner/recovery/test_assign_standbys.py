"""Standbys are kept warm for the stages that need it most, wherever they fit."""

import itertools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.planner.problem import Goal, Line, Network, Provider
from ravnest.planner.recovery.assign_standbys import Warm, assign_standbys
from tests.planner.made_up import cut_at, machine, model, named

GOAL, COSTS = Goal(), model(12)


def assigned(
    *standbys: Provider,
    cuts: tuple[int, ...] = (4, 8),
    network: Network = Network(),  # noqa: B008
    reliability: dict[str, float] | None = None,
) -> dict[str, Warm]:
    trust = reliability or {}
    stages = ("ann", "bob", "cat")[: len(cuts) + 1]
    nodes = named(*(machine(name, reliability=trust.get(name, 1.0)) for name in stages), *standbys)
    holders = [name for name in ("ann", "bob", "cat") if name in nodes]
    plan = cut_at(COSTS, GOAL, network, nodes, (holders, cuts))
    return assign_standbys(plan.clusters, standbys, nodes, network)


def needed(number: int, cuts: tuple[int, ...] = (4, 8)) -> float:
    nodes = named(*(machine(name) for name in ("ann", "bob", "cat")))
    return cut_at(COSTS, GOAL, Network(), nodes, (["ann", "bob", "cat"], cuts)).clusters[0].stages[number].memory_bytes


def test_the_least_reliable_stage_has_the_first_standby() -> None:
    found = assigned(machine("gus"), reliability={"ann": 0.9, "bob": 0.4, "cat": 0.8})
    assert (found["gus"].cluster, found["gus"].stage, found["gus"].provider) == (0, 1, "bob")
    assert "reliability 0.40" in found["gus"].reason


def test_of_equally_reliable_stages_the_largest_has_it() -> None:
    assert assigned(machine("gus"), cuts=(2, 4))["gus"].stage == 2


def test_different_stages_come_before_a_second_standby_for_one() -> None:
    found = assigned(*(machine(n) for n in ("gus", "hal", "ian", "jim")), reliability={"bob": 0.1, "cat": 0.5})
    assert sorted(str(warm.provider) for warm in found.values()) == ["ann", "bob", "bob", "cat"]
    assert found["jim"].provider == "bob" and "has a standby already" in found["jim"].reason


def test_a_standby_has_only_a_stage_that_its_memory_holds() -> None:
    cuts = (2, 4)  # the last stage is the largest
    found = assigned(machine("gus", memory=needed(1, cuts)), cuts=cuts, reliability={"cat": 0.1, "bob": 0.5})
    assert found["gus"].provider == "bob"


def test_a_standby_that_holds_no_stage_is_told_why() -> None:
    found = assigned(machine("gus", memory=1e6))["gus"]
    assert found.stage is None and "the smallest stage needs" in found.reason


def test_the_small_one_makes_room_so_that_two_stages_have_a_standby() -> None:
    cuts = (2, 4)
    small = machine("gus", memory=needed(0, cuts), mbps=1)
    # By its line alone hal, the only one for the last stage, would have the first.
    found = assigned(small, machine("hal", mbps=1000), cuts=cuts, reliability={"ann": 0.1, "bob": 0.9, "cat": 0.5})
    assert (found["gus"].provider, found["hal"].provider) == ("ann", "cat")


def test_the_standby_with_the_best_line_to_the_neighbours_has_the_stage() -> None:
    quick = Line(5e7, 0.001)
    near = {pair: quick for one in ("ann", "cat") for pair in ((one, "hal"), ("hal", one))}
    found = assigned(machine("gus"), machine("hal"), network=Network(near), reliability={"bob": 0.1, "cat": 0.5})
    assert (found["hal"].provider, found["gus"].provider) == ("bob", "cat")


def test_a_stage_alone_has_a_standby_too() -> None:
    assert assigned(machine("gus"), cuts=())["gus"].provider == "ann"


def test_without_clusters_nobody_is_kept_warm() -> None:
    found = assign_standbys([], [machine("gus")], {}, Network())
    assert found["gus"].stage is None


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), max_size=6),
    st.lists(st.floats(0, 1), min_size=3, max_size=3),
    st.randoms(use_true_random=False),
)
def test_as_many_stages_as_possible_have_one_whatever_the_order_of_names(sizes, trusts, random) -> None:  # type: ignore[no-untyped-def]
    cuts = (2, 6)
    standbys = [machine(f"s{i}", memory=size * needed(0, cuts)) for i, size in enumerate(sizes)]
    trust = dict(zip(("ann", "bob", "cat"), trusts, strict=True))
    found = assigned(*standbys, cuts=cuts, reliability=trust)
    shuffled = list(standbys)
    random.shuffle(shuffled)
    assert assigned(*shuffled, cuts=cuts, reliability=trust) == found
    by_name = {s.name: s for s in standbys}
    for name, warm in found.items():
        if warm.stage is not None:
            assert by_name[name].memory_bytes >= int(needed(warm.stage, cuts)) - 1
    covered = {warm.stage for warm in found.values() if warm.stage is not None}
    best = 0
    for order in itertools.permutations(standbys, min(3, len(standbys))):
        for stages in itertools.permutations(range(3), len(order)):
            fits = [s.memory_bytes >= needed(k, cuts) for s, k in zip(order, stages, strict=True)]
            best = max(best, sum(fits))
    assert len(covered) == best


def test_the_line_between_a_leaf_that_looks_rows_up_and_the_root_counts() -> None:
    nodes = named(*(machine(name) for name in ("ann", "bob", "cat", "gus", "hal")))
    quick, standbys = Line(5e7, 0.001), [nodes["gus"], nodes["hal"]]
    # Both have quick lines to the stage next to the root, and only hal has one to the leaf.
    near = {pair: quick for pair in (("bob", "gus"), ("gus", "bob"), ("bob", "hal"), ("hal", "bob"))}
    near |= {pair: quick for pair in (("cat", "hal"), ("hal", "cat"))}
    nodes["ann"] = replace(nodes["ann"], reliability=0.1)
    found = {}
    for rows_bytes in (0.0, 1e4):
        costs = replace(COSTS, rows_bytes=rows_bytes)
        plan = cut_at(costs, GOAL, Network(near), nodes, (("ann", "bob", "cat"), (4, 8)))
        assert plan.clusters[0].looks_up == bool(rows_bytes)
        assigned_to = assign_standbys(plan.clusters, standbys, nodes, Network(near))
        found[bool(rows_bytes)] = next(name for name, warm in assigned_to.items() if warm.stage == 0)
    assert found == {False: "gus", True: "hal"}

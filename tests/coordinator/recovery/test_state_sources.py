"""Who lends what a stage lacks that nobody has kept, and what is lost to it."""

import torch

from ravnest.coordinator.feed.cluster_state import ClusterRun, FedMicrobatch
from ravnest.coordinator.feed.feeder import TrainBatch
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.recovery.state_sources import lenders, samples_lost
from ravnest.coordinator.replicas.replica import Replica
from ravnest.graph.portable import PortableGraph, WeightSpec
from tests.builders import cluster_plan, stage_plan


def graph(*keys: str) -> PortableGraph:
    return PortableGraph((), parameters=tuple(WeightSpec(key, key, torch.float32, (3,)) for key in keys))


def a_cluster(number: int, *stages: tuple[str, str]) -> ClusterRun:
    """Of each stage who has it, and the letters of its parameters."""
    plans = tuple(stage_plan(node, n, graph(*keys), parameters=3) for n, (node, keys) in enumerate(stages))
    return ClusterRun(cluster_plan(plans, number, 2))


def replica(updates: int, *nodes: set[str]) -> Replica:
    return Replica(updates, DataPosition(updates=updates), tuple(map(frozenset, nodes)))


def test_those_stages_lend_that_have_something_of_it_however_that_cluster_is_cut() -> None:
    other = a_cluster(1, ("p", "abc"), ("q", "de"), ("r", "f"))
    kept = replica(7, {"p", "q"}, {"q"}, {"r"})
    lacking = graph("c", "d")
    found = lenders("f", [lacking], {1: (other, kept)}, {"p", "q"})
    assert list(found) == [1] and found[1].stages_for(lacking) == [0, 1]
    assert found[1].keys == ("f-0-0", "f-0-1", "f-0-2")
    # Somebody has to have it who is there.
    assert lenders("f", [graph("f")], {1: (other, kept)}, {"p", "q"}) == {}
    assert lenders("f", [graph("c"), graph("f")], {1: (other, kept)}, {"p", "q"}) == {}
    assert lenders("f", [graph("c")], {1: (other, None)}, {"p", "q"}) == {}


def test_whoever_has_the_newest_replica_is_asked_first() -> None:
    others = {
        number: (a_cluster(number, (node, "abc")), replica(updates, {node}))
        for number, node, updates in ((1, "p", 5), (2, "q", 9), (3, "r", 9))
    }
    assert list(lenders("f", [graph("b")], others, {"p", "q", "r"})) == [2, 3, 1]


def fed(microbatches: int, kept_from: int) -> ClusterRun:
    """A cluster that was fed so many of eight samples each, and has kept the later ones."""
    cluster = a_cluster(0, ("p", "a"))
    cluster.fed_samples = 8 * microbatches
    for number in range(kept_from, microbatches):
        cluster.retained[number] = FedMicrobatch(TrainBatch(number, {}, 8, DataPosition()), True)
    return cluster


def test_what_was_averaged_is_not_fed_again_and_what_is_kept_is_not_lost() -> None:
    cluster = fed(10, kept_from=6)
    assert cluster.among_first(8 * 8) == {6, 7}
    assert cluster.among_first(8 * 8 + 4) == {6, 7}
    assert cluster.among_first(0) == set()
    assert cluster.among_first(80) == {6, 7, 8, 9}
    # The last round had four of ten: of the six since, four can be fed again.
    assert samples_lost(cluster, 8 * 4) == 16
    assert samples_lost(cluster, 8 * 6) == samples_lost(cluster, 8 * 8) == samples_lost(cluster, 80) == 0
    assert samples_lost(fed(10, kept_from=0), 0) == 0

"""Which cluster gets the next microbatch, and what becomes of a lost one's."""

import pytest
import torch

from ravnest.coordinator.feed.cluster_state import ClusterRun, Clusters, RoundMark, hungriest
from ravnest.coordinator.feed.feeder import EvalBatch, TrainBatch
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.graph.portable import PortableGraph, ValueSpec
from ravnest.planner.plan import ClusterPlan
from tests.builders import cluster_plan, stage_plan


def plan(number: int, in_flight: int = 2, ahead: int = 1, stages: int = 2) -> ClusterPlan:
    nodes = [stage_plan(f"c{number}s{s}", s, cluster=number) for s in range(stages)]
    return cluster_plan(nodes, number, in_flight, ahead)


def batch(number: int) -> TrainBatch:
    return TrainBatch(number, {}, 8, DataPosition())


def feed(clusters: Clusters, number: int, ends: bool = True) -> ClusterRun | None:
    """As Feeding does it."""
    cluster = clusters.for_batch()
    if cluster is not None:
        clusters.group = None if ends else cluster
        cluster.open[number] = batch(number)
        cluster.fed_samples += 8
    return cluster


def fill(clusters: Clusters, first: int = 0) -> int:
    """Feeds until nobody has room; the number of the next microbatch."""
    while feed(clusters, first) is not None:
        first += 1
    return first


def test_all_are_filled_in_turn_and_the_first_of_several_alike_comes_first() -> None:
    clusters = Clusters([plan(0), plan(1), plan(2)])
    order = [cluster.id for number in range(9) if (cluster := feed(clusters, number)) is not None]
    assert order == [0, 1, 2] * 3
    assert clusters.for_batch() is None and [c.room for c in clusters.all] == [0, 0, 0]


def test_data_that_comes_slower_than_it_is_learnt_goes_to_all_in_turn() -> None:
    clusters = Clusters([plan(0), plan(1), plan(2)])
    order = []
    for number in range(9):
        cluster = feed(clusters, number)
        assert cluster is not None
        order.append(cluster.id)
        cluster.open.clear()
    assert order == [0, 1, 2] * 3


def test_every_stage_is_told_of_each_microbatch_even_where_it_needs_nothing_of_the_batch() -> None:
    value, inputs = ValueSpec("hidden", torch.float32), (ValueSpec("inputs", torch.float32),)
    graphs = (
        PortableGraph((), sends=(value,)),
        PortableGraph((), receives=(value,), sends=(value,)),
        PortableGraph((), receives=(value,), inputs=inputs),
    )
    stages = tuple(stage_plan(f"s{number}", number, graph) for number, graph in enumerate(graphs))
    told = ClusterRun(cluster_plan(stages, ahead=0)).inputs_of
    assert told == [("s0", ()), ("s1", ()), ("s2", ("inputs",))]


def test_whoever_completes_something_gets_the_next() -> None:
    clusters = Clusters([plan(0), plan(1)])
    number = fill(clusters)
    for slow in (1, 0, 0, 1, 1, 1):
        done = clusters.all[slow]
        done.open.pop(min(done.open))
        assert feed(clusters, number) is done
        number += 1


@pytest.mark.parametrize("times", [2, 3, 5])
def test_a_cluster_that_is_so_many_times_faster_does_so_many_times_as_much(times: int) -> None:
    clusters = Clusters([plan(0), plan(1)])
    slow, fast = clusters.all
    number = fill(clusters)
    for tick in range(300):
        for cluster in [fast, slow] if tick % times == 0 else [fast]:
            cluster.open.pop(min(cluster.open))
        number = fill(clusters, number)
    assert fast.fed_samples / slow.fed_samples == pytest.approx(times, rel=0.05)


def test_room_counts_for_the_size_of_a_cluster() -> None:
    large, small = ClusterRun(plan(0, in_flight=8, ahead=0)), ClusterRun(plan(1, in_flight=1, ahead=0))
    assert hungriest([(large, 4), (small, 1)]) is small
    assert hungriest([(large, 8), (small, 1)]) is large
    assert hungriest([(small, 1), (large, 8)]) is small
    assert hungriest([(large, 1), (small, 0)]) is large
    assert hungriest([(large, 0), (small, 0)]) is None and hungriest([]) is None


def test_what_belongs_to_one_update_goes_to_one_cluster() -> None:
    clusters = Clusters([plan(0), plan(1)])
    first = [feed(clusters, number, ends=number == 2) for number in range(3)]
    assert [cluster.id for cluster in first if cluster is not None] == [0, 0, 0] and clusters.group is None
    # One that is full in the middle of an update is waited for, though the other has room.
    assert feed(clusters, 3, ends=False) is clusters.all[1]
    for number in (4, 5):
        assert feed(clusters, number, ends=False) is clusters.all[1]
    clusters.all[0].open.clear()
    assert clusters.all[0].room > 0 and clusters.for_batch() is None
    clusters.all[1].open.pop(3)
    assert feed(clusters, 6) is clusters.all[1]
    assert feed(clusters, 7) is clusters.all[0]


def test_a_lost_cluster_gives_back_what_it_had_and_gets_nothing_more() -> None:
    clusters = Clusters([plan(0), plan(1)])
    fill(clusters)
    lost, other = clusters.all
    had = list(lost.open)
    lost.evaluating[-3] = EvalBatch(-3, {}, 8)
    lost.mark = RoundMark(4, 0)
    left, evaluations = clusters.lose(lost, "its root has left")
    assert [item.microbatch for item in left] == had and [item.microbatch for item in evaluations] == [-3]
    assert (
        lost.is_lost
        and lost.reason == "its root has left"
        and lost.mark is None
        and not lost.open
        and not lost.evaluating
    )
    assert clusters.whole == [other] and clusters.of("c0s1") is None and clusters.of("c1s1") is other
    assert clusters.of("nobody") is None
    assert clusters.for_batch() is None
    other.open.clear()
    assert clusters.for_batch() is other and clusters.for_evaluation() is other


def test_an_update_that_was_begun_in_a_lost_cluster_is_not_waited_for() -> None:
    clusters = Clusters([plan(0), plan(1)])
    assert feed(clusters, 0, ends=False) is clusters.all[0]
    clusters.lose(clusters.all[1], "gone")
    assert clusters.group is clusters.all[0]
    clusters = Clusters([plan(0), plan(1)])
    assert feed(clusters, 0, ends=False) is clusters.all[0]
    left, _ = clusters.lose(clusters.all[0], "gone")
    assert [item.microbatch for item in left] == [0] and clusters.group is None
    assert clusters.for_batch() is clusters.all[1]


def test_evaluations_have_room_of_their_own() -> None:
    clusters = Clusters([plan(0), plan(1)])
    fill(clusters)
    order = []
    while (cluster := clusters.for_evaluation()) is not None:
        cluster.evaluating[-len(order) - 1] = EvalBatch(-len(order) - 1, {}, 8)
        order.append(cluster.id)
    assert order == [0, 1] * 5

"""When replicas are announced, when they are complete, and what is kept for feeding again until then."""

import math
from typing import Any, cast

import pytest

from ravnest.coordinator.feed.cluster_state import ClusterRun, FedMicrobatch
from ravnest.coordinator.feed.feeder import TrainBatch
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.replicas import tracker as module
from ravnest.coordinator.replicas.tracker import Replica, ReplicaTracker
from ravnest.engine.inbox.applied import REMEMBERED
from ravnest.net.v1.control_pb2 import Replicated
from tests.builders import cluster_plan, stage_plan

KEYS = ("f-0-0", "f-0-1")


class Bench:
    """Two stages, a and b, each the holder of the other, and a clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        stages = tuple(stage_plan(name, k) for k, name in enumerate("ab"))
        self.cluster = ClusterRun(cluster_plan(stages, in_flight=2))
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.announced: list[tuple[int, int]] = []
        self.replicas = ReplicaTracker(
            lambda kind, reason, **values: self.events.append((kind, values)),
            lambda: None,
            lambda node: 1e6,
            lambda cluster, number, place: self.announced.append((cluster, number)),
        )
        self.replicas.set_holders(self.cluster, KEYS, {0: "b", 1: "a"})

    def feed(self, microbatch: int) -> int:
        item = TrainBatch(microbatch, {}, 8, DataPosition(updates=microbatch + 1, microbatches=microbatch + 1))
        number = self.replicas.announce_with(self.cluster, item)
        self.cluster.retained[microbatch] = FedMicrobatch(item, True)
        return number

    def says(self, node: str, stage: int, number: int, holder: str = "", error: str = "", seconds: float = 0.0) -> None:
        message = Replicated(
            key=KEYS[stage], replica=number, holder=holder, size_bytes=10, error=error, seconds=seconds
        )
        self.replicas.on_replicated(node, message, [self.cluster])


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_one_is_complete_once_every_stage_has_said_so_and_what_was_fed_up_to_it_is_let_go(bench: Bench) -> None:
    bench.feed(0)
    bench.now += 10
    number = bench.feed(1)
    assert number == 2 and bench.announced == [(0, 2)]
    bench.feed(2)
    bench.says("a", 0, number, "b")
    assert bench.replicas.newest(bench.cluster) is None and list(bench.cluster.retained) == [0, 1, 2]
    bench.says("b", 1, number, "a")
    kept = bench.replicas.newest(bench.cluster)
    assert kept is not None and kept.number == 2 and kept.nodes == (frozenset("ab"), frozenset("ab"))
    assert list(bench.cluster.retained) == [2]
    assert [kind for kind, _ in bench.events] == ["replica"]


def test_the_next_is_announced_before_the_last_is_complete_once_stages_can_have_sent_that(bench: Bench) -> None:
    bench.now += 10
    assert bench.feed(0) == 1
    bench.says("a", 0, 1, "b", seconds=4.0)
    bench.says("b", 1, 1, "a", seconds=math.nan)
    bench.now += 10
    assert bench.feed(1) == 2
    bench.now += 4.3
    assert bench.feed(2) == 0, "they are still sending"
    bench.now += 0.2
    assert bench.feed(3) == 4
    bench.now += 100 * 0.2
    assert bench.feed(4) == 0, "two are under way"
    for stage, (node, holder) in enumerate(("ab", "ba")):
        bench.says(node, stage, 4, holder)
    kept = bench.replicas.newest(bench.cluster)
    assert kept is not None and kept.number == 4
    assert list(bench.cluster.retained) == [4]
    bench.says("a", 0, 2, "b")
    bench.says("b", 1, 2, "a")
    assert bench.replicas.newest(bench.cluster) == kept, "one that is older comes too late"


def test_each_of_two_under_way_lets_go_what_was_fed_up_to_it(bench: Bench) -> None:
    bench.now += 10
    assert bench.feed(0) == 1
    bench.says("a", 0, 1, "b")
    bench.says("b", 1, 1, "a")
    bench.now += 10
    assert [bench.feed(1), bench.feed(2)] == [2, 0]
    bench.now += 10
    assert [bench.feed(3), bench.feed(4)] == [4, 0]
    for number, left in ((2, [2, 3, 4]), (4, [4])):
        bench.says("a", 0, number, "b")
        bench.says("b", 1, number, "a")
        assert list(bench.cluster.retained) == left


def test_the_second_waits_for_the_first(bench: Bench) -> None:
    bench.now += 10
    assert bench.feed(0)
    bench.now += 10
    assert bench.feed(1) == 0
    bench.says("a", 0, 1, "b")
    bench.says("b", 1, 1, "a")
    assert bench.feed(2) == 3


def test_only_the_owner_of_a_stage_says_that_its_part_is_kept(bench: Bench) -> None:
    bench.now += 10
    number = bench.feed(0)
    bench.says("a", 0, number, "b")
    bench.says("a", 1, number, "b")
    assert bench.replicas.newest(bench.cluster) is None


def test_what_was_fed_in_another_order_than_its_numbers_is_let_go_in_that_order(bench: Bench) -> None:
    """After a cluster was lost, older microbatches come behind newer ones."""
    bench.feed(7)
    bench.feed(3)
    bench.now += 10
    number = bench.feed(9)
    bench.feed(4)
    bench.says("a", 0, number, "b")
    bench.says("b", 1, number, "a")
    assert list(bench.cluster.retained) == [4]


def test_one_that_fails_is_told_of_and_the_next_is_not_tried_at_once(bench: Bench) -> None:
    bench.now += 10
    number = bench.feed(0)
    bench.says("a", 0, number, error="the disk is full")
    assert bench.events[-1][0] == "replica_failed"
    bench.now += 1
    assert bench.feed(1) == 0
    bench.now += 10
    assert bench.feed(2) == 3


def test_one_that_never_becomes_complete_is_given_up(bench: Bench) -> None:
    bench.now += 10
    assert bench.feed(0)
    bench.now += 61
    bench.feed(1)
    assert bench.events[-1][0] == "replica_failed"


def test_one_that_is_wanted_is_taken_with_the_next_update(bench: Bench) -> None:
    bench.now += 10
    bench.says("a", 0, bench.feed(0), "b")
    bench.says("b", 1, 1, "a")
    assert bench.feed(1) == 0
    bench.replicas.request(bench.cluster)
    assert bench.feed(2) == 3


def test_who_is_gone_has_no_part_any_more_and_who_is_back_has_what_it_says(bench: Bench) -> None:
    bench.now += 10
    number = bench.feed(0)
    bench.says("a", 0, number, "b")
    bench.says("b", 1, number, "a")
    bench.replicas.remove_provider("a")
    kept = bench.replicas.newest(bench.cluster)
    assert kept is not None and kept.nodes == (frozenset("b"), frozenset("b"))
    assert kept.is_available({"b"}) and not kept.is_available({"c"})
    bench.replicas.add_parts("a", {(KEYS[1], number): "", (KEYS[0], number + 1): ""})
    kept = bench.replicas.newest(bench.cluster)
    assert kept is not None and kept.nodes == (frozenset("b"), frozenset("ab"))


def test_forming_the_cluster_anew_gives_up_the_one_under_way(bench: Bench) -> None:
    bench.now += 10
    number = bench.feed(0)
    bench.replicas.set_holders(bench.cluster, KEYS, {0: "b", 1: "a"})
    bench.says("a", 0, number, "b")
    bench.says("b", 1, number, "a")
    assert bench.replicas.newest(bench.cluster) is None


def test_new_holders_get_one_at_once(bench: Bench) -> None:
    bench.now += 10
    number = bench.feed(0)
    bench.says("a", 0, number, "b")
    bench.says("b", 1, number, "a")
    assert bench.feed(1) == 0
    bench.replicas.set_holders(bench.cluster, KEYS, {0: "c", 1: "a"})
    assert bench.feed(2) == 3


def test_what_is_kept_for_feeding_again_has_a_bound_and_it_is_known_how_many_are_missing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RETAINED", 3)
    for number in range(6):
        bench.feed(number)
    assert len(bench.cluster.retained) == 4 and bench.cluster.dropped == 2
    # What is under way is never dropped: nobody else would have it.
    bench.cluster.open[2] = cast(Any, None)
    bench.feed(6)
    assert 2 in bench.cluster.retained


def test_a_replica_is_whole_while_of_each_stage_somebody_is_there() -> None:
    replica = Replica(1, DataPosition(), (frozenset("ab"), frozenset("c")))
    assert replica.is_available({"b", "c"})
    assert not replica.is_available({"a", "b"})


def test_one_that_becomes_complete_while_the_cluster_is_formed_anew_lets_nothing_go(bench: Bench) -> None:
    """It is formed from the one before, and needs all that was fed since."""
    bench.now += 10
    number = bench.feed(0)
    bench.feed(1)
    bench.says("a", 0, number, "b")
    bench.cluster.begin_forming("b failed")
    bench.says("b", 1, number, "a")
    assert bench.replicas.newest(bench.cluster) is None and list(bench.cluster.retained) == [0, 1]
    bench.replicas.cancel_pending(bench.cluster)
    bench.cluster.resume()
    bench.says("b", 1, number, "a")
    assert bench.replicas.newest(bench.cluster) is None
    assert bench.feed(2) == 0, "it is not given up as one that failed: the next is due when it is"
    bench.now += 10
    assert bench.feed(3) == 4


def test_an_owner_names_no_other_holder_than_it_was_given(bench: Bench) -> None:
    """Else one that lies would have others asked for what they never had."""
    bench.now += 10
    number = bench.feed(0)
    bench.says("a", 0, number, "somebody")
    bench.says("b", 1, number, "a")
    kept = bench.replicas.newest(bench.cluster)
    assert kept is not None and kept.nodes == (frozenset("a"), frozenset("ab"))


def test_who_lacks_a_part_is_not_asked_for_it_again_and_its_other_parts_stand(bench: Bench) -> None:
    bench.now += 10
    number = bench.feed(0)
    bench.says("a", 0, number, "b")
    bench.says("b", 1, number, "a")
    bench.replicas.remove_part(bench.cluster, 0, "b")
    kept = bench.replicas.newest(bench.cluster)
    assert kept is not None and kept.nodes == (frozenset("a"), frozenset("ab"))


@pytest.mark.parametrize("text", ["", "x" * 64, "0" * 63, "../" * 20])
def test_a_hash_that_is_none_is_not_believed(bench: Bench, text: str) -> None:
    bench.now += 10
    number = bench.feed(0)
    for stage, node in enumerate("ab"):
        said = Replicated(key=KEYS[stage], replica=number, sha256=text if stage else "0" * 64)
        bench.replicas.on_replicated(node, said, [bench.cluster])
    kept = bench.replicas.newest(bench.cluster)
    assert kept is not None and kept.sha256(0) == "0" * 64 and kept.sha256(1) == ""


def test_a_holder_with_a_rounded_part_has_a_hash_of_its_own(bench: Bench) -> None:
    bench.now += 10
    number = bench.feed(0)
    for stage, (node, holder) in enumerate(("ab", "ba")):
        said = Replicated(key=KEYS[stage], replica=number, holder=holder, sha256=str(stage) * 64)
        said.size_bytes, said.sent_bytes = 1200, 300
        said.holder_sha256 = "f" * 64 if stage else said.sha256
        bench.replicas.on_replicated(node, said, [bench.cluster])
    kept = bench.replicas.newest(bench.cluster)
    assert kept is not None
    assert [kept.sha256(0, "a"), kept.sha256(0, "b")] == ["0" * 64, "0" * 64]
    assert [kept.sha256(1, "b"), kept.sha256(1, "a")] == ["1" * 64, "f" * 64]
    assert bench.events[-1][1]["sent_bytes"] == 300 and bench.events[-1][1]["bytes"] == 1200


def test_a_provider_that_rejoins_is_expected_to_have_the_form_of_the_part_that_it_names(bench: Bench) -> None:
    bench.now += 10
    number = bench.feed(0)
    for stage, (node, holder) in enumerate(("ab", "ba")):
        said = Replicated(key=KEYS[stage], replica=number, holder=holder, sha256=str(stage) * 64)
        said.holder_sha256 = "f" * 64 if stage else said.sha256
        bench.replicas.on_replicated(node, said, [bench.cluster])
    for node, start in (("exact", "1" * 16), ("rounded", "f" * 16), ("other", "e" * 16), ("silent", "")):
        bench.replicas.add_parts(node, {(KEYS[1], number): start})
    kept = bench.replicas.newest(bench.cluster)
    assert kept is not None and kept.nodes[1] == {"a", "b", "exact", "rounded"}
    assert [kept.sha256(1, node) for node in ("exact", "rounded", "a")] == ["1" * 64, "f" * 64, "f" * 64]
    bench.replicas.add_parts("a", {(KEYS[1], number): "1" * 16})
    kept = bench.replicas.newest(bench.cluster)
    assert kept is not None and kept.sha256(1, "a") == "1" * 64, "it has fetched the part from its owner since"


def test_what_could_not_be_kept_beyond_a_replica_is_still_missing_when_that_is_complete(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RETAINED", 3)
    bench.now += 10
    number = bench.feed(0)
    for other in range(1, 8):
        bench.feed(other)
    # Kept are 4 to 7; without 1 to 3 nobody can go on from this one.
    bench.says("a", 0, number, "b")
    bench.says("b", 1, number, "a")
    assert bench.cluster.dropped == 3 and list(bench.cluster.retained) == [4, 5, 6, 7]


def test_a_replica_has_a_higher_number_than_those_before_it(bench: Bench) -> None:
    """Providers keep the highest: one with what another cluster left undone would be thrown away at once."""
    bench.now += 10
    bench.says("a", 0, bench.feed(7), "b")
    bench.says("b", 1, 8, "a")
    bench.now += 10
    assert bench.feed(3) == 0
    assert bench.feed(9) == 10


def test_a_stage_remembers_all_that_may_be_fed_again() -> None:
    assert module.MAX_RETAINED + 1000 <= REMEMBERED


def test_periods_follow_what_replicas_really_took_from_the_second_on(bench: Bench) -> None:
    def complete(number: int, seconds: float) -> None:
        for stage, (node, holder) in enumerate(("ab", "ba")):
            bench.says(node, stage, number, holder, seconds=seconds)

    planned = bench.replicas.periods(bench.cluster, None)
    bench.now += 10
    complete(bench.feed(0), 500.0)
    assert bench.replicas.periods(bench.cluster, None).sending_seconds < 1, "the first is no difference"
    bench.now += 1000
    complete(bench.feed(1), 50.0)
    found = bench.replicas.periods(bench.cluster, None)
    assert found.sending_seconds == 50.0 and found.replica_seconds == 75.0 > planned.replica_seconds

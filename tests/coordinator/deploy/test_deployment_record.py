"""What a coordinator notes of its stages for the next one, and what that makes of it."""

from dataclasses import replace

import pytest

from ravnest.coordinator.deploy.deployment_record import Claim, ClusterRecord, DeploymentRecord, claims_of
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.swarm.members import Held
from ravnest.engine.inbox.applied import REMEMBERED
from ravnest.errors import RunError
from ravnest.planner.search.fixed_layout import ClusterLayout

PLACE = DataPosition(epoch=1, position=4, microbatches=20, updates=20, samples=160, data_state="x")
PAIR, ONE = ClusterRecord(ClusterLayout(("a", "b"), (7,), 4), 64, (1,)), ClusterRecord(ClusterLayout(("c",), (), 1), 0)
STANDING = DeploymentRecord("f", 9, 3, (PAIR, ONE), 5, PLACE, "digest")
HELD = {"a": Held("f", 0, 2), "b": Held("f", 1, 2), "c": Held("f", 0, 1), "d": None}


def test_it_is_read_as_it_was_written() -> None:
    assert DeploymentRecord.from_json(STANDING.to_json()) == STANDING
    assert STANDING.nodes == ["a", "b", "c"] and STANDING.later_generation > 1000


@pytest.mark.parametrize("text", ["", "{}", "[1]", STANDING.to_json().replace("epoch", "era")])
def test_a_damaged_store_is_told(text: str) -> None:
    with pytest.raises(RunError, match="the store of the run is damaged"):
        DeploymentRecord.from_json(text)


def test_whoever_is_gone_or_holds_something_else_has_lost_its_stage() -> None:
    pair = replace(PAIR, taking=())
    assert pair.lost("f", HELD) == ONE.lost("f", HELD) == {}
    assert pair.lost("f", {**HELD, "b": None}) == {1: "b"}
    assert pair.lost("g", HELD) == {0: "a", 1: "b"}
    assert pair.lost("f", {**HELD, "a": HELD["b"], "b": HELD["a"]}) == {0: "a", 1: "b"}
    assert pair.lost("f", {**HELD, "a": Held("f", 0, 3)}) == {0: "a"}
    assert ONE.lost("f", {name: held for name, held in HELD.items() if name != "c"}) == {0: "c"}


def test_a_stage_that_was_being_taken_may_lack_what_the_others_have() -> None:
    assert PAIR.lost("f", HELD) == {1: "b"}


def test_what_all_stages_of_a_cluster_have_is_counted_and_the_rest_is_fed_to_it_again() -> None:
    claims = claims_of([[[18, 19, 21], [18, 19, 21, 24]], [[20, 22], [20, 22]]], 20)
    assert claims == {
        20: Claim(1, True),
        21: Claim(0, True),
        22: Claim(1, True),
        24: Claim(0, False),
    }


def test_of_two_clusters_the_one_that_has_all_of_it_counts() -> None:
    assert claims_of([[[5], []], [[5], [5]]], 0) == {5: Claim(1, True)}
    assert claims_of([[[5], [5]], [[5], []]], 0) == {5: Claim(0, True)}


def test_stages_that_do_not_remember_far_enough_or_say_what_cannot_be_are_not_taken_over() -> None:
    newest = list(range(100, 100 + REMEMBERED))
    assert len(claims_of([[newest]], 100)) == REMEMBERED
    with pytest.raises(ValueError, match="does not remember"):
        claims_of([[newest]], 99)
    with pytest.raises(ValueError, match="never fed"):
        claims_of([[[100 + REMEMBERED]]], 100)

"""Who gives the stages of a new formation what they begin with."""

import pytest
import torch

from ravnest.coordinator.feed.ledger import Place
from ravnest.coordinator.replicas.sources import Donors, choose_sources
from ravnest.coordinator.replicas.tracker import Replica
from ravnest.graph.portable import PortableGraph, WeightSpec


def graph(keys: str, states: str = "") -> PortableGraph:
    def specs(names: str) -> tuple[WeightSpec, ...]:
        return tuple(WeightSpec(key, key, torch.float32, (3,)) for key in names)

    return PortableGraph((), parameters=specs(keys), states=specs(states))


def donors(*nodes: set[str]) -> Donors:
    """Of three stages, ab, cd and ef, who has their parts."""
    graphs = [graph("ab"), graph("c", "d"), graph("ef")]
    replica = Replica(7, Place(updates=5), tuple(map(frozenset, nodes)), ("00", "11", "22"))
    return Donors.of([f"old-0-{stage}" for stage in range(3)], graphs, replica)


EVERYBODY = donors({"p", "q"}, {"q", "r"}, {"r", "p"})


def test_a_stage_begins_with_every_part_that_has_something_of_it_however_the_model_was_cut() -> None:
    found = choose_sources(EVERYBODY, {"s": graph("bc", "d")}, {"p", "q", "r", "s"})
    assert [(source.key, source.sha256) for source in found["s"]] == [("old-0-0", "00"), ("old-0-1", "11")]
    assert {source.replica for source in found["s"]} == {7}
    assert choose_sources(EVERYBODY, {"s": graph("")}, {"s"}) == {"s": []}


def test_what_is_on_ones_own_disk_comes_from_nowhere_else() -> None:
    found = choose_sources(EVERYBODY, {"p": graph("abef"), "q": graph("c", "d")}, {"p", "q", "r"})
    assert [source.giver for source in found["p"] + found["q"]] == ["", "", ""]


def test_as_many_give_as_can() -> None:
    stages = {taker: graph("abcdef") for taker in ("s", "t")}
    found = choose_sources(EVERYBODY, stages, {"p", "q", "r", "s", "t"})
    assert sorted(source.giver for of_taker in found.values() for source in of_taker) == list("ppqqrr")


def test_who_is_gone_or_has_it_not_gives_nothing() -> None:
    assert [s.giver for s in choose_sources(EVERYBODY, {"s": graph("a")}, {"q", "s"})["s"]] == ["q"]
    without = EVERYBODY.without("old-0-0", "q")
    assert [s.giver for s in choose_sources(without, {"s": graph("a")}, {"p", "q"})["s"]] == ["p"]
    assert without.can_give(graph("a"), {"p"}) and not without.can_give(graph("a"), {"q", "r"})
    with pytest.raises(KeyError, match="old-0-0"):
        choose_sources(without, {"s": graph("a")}, {"q", "r"})

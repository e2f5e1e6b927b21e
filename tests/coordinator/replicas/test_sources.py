"""State sources: which provider sends which part of a replica to the stages of a new deployment."""

from dataclasses import replace

import pytest
import torch

from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.replicas.replica import Replica
from ravnest.coordinator.replicas.sources import ReplicaSources, choose_transfers
from ravnest.graph.portable import PortableGraph, WeightSpec


def graph(keys: str, states: str = "") -> PortableGraph:
    def specs(names: str) -> tuple[WeightSpec, ...]:
        return tuple(WeightSpec(key, key, torch.float32, (3,)) for key in names)

    return PortableGraph((), parameters=specs(keys), states=specs(states))


def sources(*nodes: set[str]) -> ReplicaSources:
    """The sources of three stages, ab, cd and ef."""
    graphs = [graph("ab"), graph("c", "d"), graph("ef")]
    replica = Replica(7, DataPosition(updates=5), tuple(map(frozenset, nodes)), ("00", "11", "22"))
    return ReplicaSources.of([f"old-0-{stage}" for stage in range(3)], graphs, replica)


ALL_PRESENT = sources({"p", "q"}, {"q", "r"}, {"r", "p"})


def test_a_stage_starts_from_every_part_that_has_some_of_its_tensors_however_the_model_was_cut() -> None:
    found = choose_transfers(ALL_PRESENT, {"s": graph("bc", "d")}, {"p", "q", "r", "s"})
    assert [(part.key, part.sha256) for part in found["s"]] == [("old-0-0", "00"), ("old-0-1", "11")]
    assert {part.replica for part in found["s"]} == {7}
    assert choose_transfers(ALL_PRESENT, {"s": graph("")}, {"s"}) == {"s": []}


def test_a_part_is_checked_by_the_hash_that_its_sender_has() -> None:
    replica = replace(ALL_PRESENT.replica, rounded=((frozenset("q"), "33"), (frozenset(), ""), (frozenset(), "")))
    rounded = replace(ALL_PRESENT, replica=replica)
    for present, sha256 in (({"q", "s"}, "33"), ({"p", "s"}, "00")):
        assert choose_transfers(rounded, {"s": graph("a")}, present)["s"][0].sha256 == sha256
    assert choose_transfers(rounded, {"q": graph("a")}, {"p", "q"})["q"][0].sha256 == "33"


def test_a_part_on_the_receivers_own_disk_is_not_transferred() -> None:
    found = choose_transfers(ALL_PRESENT, {"p": graph("abef"), "q": graph("c", "d")}, {"p", "q", "r"})
    assert [part.sender for part in found["p"] + found["q"]] == ["", "", ""]


def test_the_transfers_are_spread_over_all_sources() -> None:
    stages = {receiver: graph("abcdef") for receiver in ("s", "t")}
    found = choose_transfers(ALL_PRESENT, stages, {"p", "q", "r", "s", "t"})
    assert sorted(part.sender for parts in found.values() for part in parts) == list("ppqqrr")


def test_a_provider_that_is_gone_or_lacks_the_part_is_no_source() -> None:
    assert [part.sender for part in choose_transfers(ALL_PRESENT, {"s": graph("a")}, {"q", "s"})["s"]] == ["q"]
    without = ALL_PRESENT.without("old-0-0", "q")
    assert [part.sender for part in choose_transfers(without, {"s": graph("a")}, {"p", "q"})["s"]] == ["p"]
    assert without.covers(graph("a"), {"p"}) and not without.covers(graph("a"), {"q", "r"})
    with pytest.raises(KeyError, match="old-0-0"):
        choose_transfers(without, {"s": graph("a")}, {"q", "r"})

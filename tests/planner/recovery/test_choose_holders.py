"""The copy of a stage is never only where the stage is."""

from ravnest.planner.recovery.choose_holders import Holder, choose_holders


def nodes(found: dict[int, Holder]) -> list[str | None]:
    return [found[number].node for number in sorted(found)]


def test_the_standby_of_a_stage_holds_its_parts() -> None:
    found = choose_holders(["ann", "bob", "cat"], {1: ["gus", "hal"]}, ["dan"])
    assert found[1].node == "gus" and "warm" in found[1].reason


def test_without_a_standby_the_next_stage_holds_them_and_for_the_last_the_one_before() -> None:
    assert nodes(choose_holders(["ann", "bob", "cat"], {})) == ["bob", "cat", "bob"]


def test_a_stage_alone_is_held_by_somebody_of_another_cluster() -> None:
    assert nodes(choose_holders(["ann"], {}, ["ann", "dan", "eve"])) == ["dan"]


def test_a_stage_alone_with_nobody_else_there_has_no_holder_and_says_so() -> None:
    found = choose_holders(["ann"], {}, [])
    assert found[0].node is None and "alone" in found[0].reason


def test_nobody_holds_its_own_part() -> None:
    found = choose_holders(["ann", "bob"], {0: ["ann"], 1: ["bob"]}, ["ann", "bob"])
    assert nodes(found) == ["bob", "ann"]

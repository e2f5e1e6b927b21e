"""The copy of a stage is never only where the stage is."""

from ravnest.planner.recovery.choose_holders import choose_holders


def test_the_standby_of_a_stage_holds_its_parts() -> None:
    assert choose_holders(["ann", "bob", "cat"], {1: ["gus", "hal"]}, ["dan"])[1] == "gus"


def test_without_a_standby_the_next_stage_holds_them_and_for_the_last_the_one_before() -> None:
    assert choose_holders(["ann", "bob", "cat"], {}) == {0: "bob", 1: "cat", 2: "bob"}


def test_a_stage_alone_is_held_by_somebody_of_another_cluster() -> None:
    assert choose_holders(["ann"], {}, ["ann", "dan", "eve"]) == {0: "dan"}


def test_a_stage_alone_with_nobody_else_there_has_no_holder() -> None:
    assert choose_holders(["ann"], {}, []) == {}


def test_nobody_holds_its_own_part() -> None:
    assert choose_holders(["ann", "bob"], {0: ["ann"], 1: ["bob"]}, ["ann", "bob"]) == {0: "bob", 1: "ann"}


def test_a_poor_line_is_avoided_where_there_is_another() -> None:
    poor = {("a", "b"), ("b", "c"), ("b", "a"), ("c", "b"), ("c", "s")}
    found = choose_holders(["a", "b", "c"], {2: ["s"]}, ["s", "t"], lambda owner, holder: (owner, holder) in poor)
    assert found == {0: "s", 1: "s", 2: "t"}


def test_a_poor_line_is_better_than_no_replica() -> None:
    assert choose_holders(["a", "b"], {}, has_poor_line=lambda owner, holder: True) == {0: "b", 1: "a"}

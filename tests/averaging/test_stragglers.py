"""Choice of the members to leave out when a reduce stalls."""

import pytest

from ravnest.averaging.stragglers import find_stragglers

ORDER = ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("reduced", "progress", "nodes", "says"),
    [
        ({"a", "b"}, {"d": 3}, ("c",), "c neither finished"),
        (set(), {"d": 3, "a": 0}, ("b", "c"), "b, c neither"),
        (set(), {}, (), "no member finished"),
        (set(), {"a": 5, "b": 4, "c": 0, "d": 3}, ("b",), "c has received 0 pieces from b"),
        (set(), {"a": 0, "b": 3, "c": 4, "d": 5}, ("d",), "a has received 0 pieces from d"),
        ({"a", "c", "d"}, {"b": 9}, ("a",), "b has received 9 pieces from a"),
        (set(), {"a": 2, "b": 2, "c": 2, "d": 2}, (), "equally slow"),
        # b has as little as a, but a is stuck further up: d sends it nothing.
        (set(), {"a": 0, "b": 0, "c": 2, "d": 5}, ("d",), "a has received 0 pieces from d"),
    ],
)
def test_silent_members_come_first_and_then_the_sender_on_the_line_that_carried_the_fewest_pieces(
    reduced: set[str], progress: dict[str, int], nodes: tuple[str, ...], says: str
) -> None:
    found = find_stragglers(ORDER, reduced, progress)
    assert found.nodes == nodes
    assert says in found.reason

"""The order of the suite, and which of its failures get a second try."""

from tests.__main__ import MAX_RETRIES, once_more
from tests.order import REAL as REAL_PLACES
from tests.order import arrange

REAL = "tests/wan/test_dead_links.py::test_a_line[10]"


def test_tests_of_real_processes_are_tried_again() -> None:
    assert once_more([REAL]) == [REAL]
    assert once_more([]) == []


def test_nothing_is_tried_again_where_the_suite_stays_red_anyway() -> None:
    assert once_more([REAL, "tests/planner/search/test_best_cuts.py::test_cuts"]) == []
    assert once_more([f"{REAL}-{number}" for number in range(MAX_RETRIES + 1)]) == []


class Item:
    """A test, as far as its order is concerned."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


def test_two_workers_begin_with_tests_that_wait_and_the_third_computes() -> None:
    names = ["tests/graph/a", "tests/e2e/b", "tests/wan/c", "tests/chaos/d", *(f"tests/planner/{n}" for n in range(5))]
    items = [Item(name) for name in names]
    arrange(items)  # type: ignore[arg-type]
    ordered = [item.nodeid for item in items]
    assert sorted(ordered) == sorted(names)
    assert ordered[:2] == ["tests/chaos/d", "tests/wan/c"] and ordered[3] == "tests/e2e/b"
    assert not any(name.startswith(REAL_PLACES) for name in ordered[6:])

"""Which failures of the suite get a second try."""

from tests.__main__ import MOST, once_more

REAL = "tests/wan/test_dead_links.py::test_a_line[10]"


def test_tests_of_real_processes_are_tried_again() -> None:
    assert once_more([REAL]) == [REAL]
    assert once_more([]) == []


def test_nothing_is_tried_again_where_the_suite_stays_red_anyway() -> None:
    assert once_more([REAL, "tests/planner/search/test_best_cuts.py::test_cuts"]) == []
    assert once_more([f"{REAL}-{number}" for number in range(MOST + 1)]) == []

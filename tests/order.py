"""The order of the suite: tests that wait for processes and lines go on beside those that compute.

With `--dist worksteal` each of three workers begins with a third of the tests, in order, and one that has no more takes
half of what another has left, from the end. So the first two begin with the tests that wait, which leave the cores idle
most of the time, and the third computes; what computes in the first two thirds is there to be taken.
"""

from typing import Final

import pytest

WORKERS: Final = 3

LANES: Final = (
    ("tests/chaos/", "tests/wan/"),
    (
        "tests/e2e_swarm/",
        "tests/soak/",
        "tests/e2e/",
        "tests/net/",
        "tests/coordinator/swarm/",
        "tests/coordinator/health/test_watchdog.py",
        "tests/provider/fetch/test_artifacts.py",
    ),
)
"""Where tests have processes or lines of their own: by worker, those that take longest first."""

REAL: Final = tuple(place for lane in LANES for place in lane)


def arrange(items: list[pytest.Item]) -> None:
    """Puts the tests that wait at the beginning of the first workers' thirds; those of a folder stay as they are."""
    lanes: list[list[pytest.Item]] = [[] for _ in LANES]
    others: list[pytest.Item] = []
    for item in items:
        number = next((n for n, lane in enumerate(LANES) if item.nodeid.startswith(lane)), None)
        (others if number is None else lanes[number]).append(item)
    share, ordered = len(items) // WORKERS, list[pytest.Item]()
    for lane, places in zip(lanes, LANES, strict=True):
        lane.sort(key=lambda item, places=places: next(n for n, p in enumerate(places) if item.nodeid.startswith(p)))
        fill = max(0, share - len(lane))
        ordered += lane + others[:fill]
        del others[:fill]
    items[:] = ordered + others

"""In which order the suite runs: tests that wait for processes and lines first, those that compute alone after them.

With `--dist worksteal` each of three workers begins with a third of them, the first with all that wait: so what waits
and what computes go on side by side, those that wait do not leave the cores idle, and none that needs its turn in time
shares them with another of its kind for long.
"""

from typing import Final

import pytest

REAL: Final = (
    "tests/chaos/",
    "tests/wan/",
    "tests/e2e_swarm/",
    "tests/soak/",
    "tests/e2e/",
    "tests/net/",
    "tests/coordinator/swarm/",
    "tests/coordinator/health/test_watchdog.py",
    "tests/provider/fetch/test_artifacts.py",
)
"""Where tests have processes or lines of their own, those that take longest first."""


def waiting_first(items: list[pytest.Item]) -> None:
    """Puts the tests in order; those of a folder stay as they are."""

    def place(item: pytest.Item) -> int:
        return next((place for place, folder in enumerate(REAL) if item.nodeid.startswith(folder)), len(REAL))

    items.sort(key=place)

"""The whole suite, as `make test` runs it: three workers, and for a test of real processes a second try with no other.

A core each for two of them is what the suite is made for: while one waits for processes and lines the others compute.

A test that starts processes, stops them, kills them or slows their lines shares its cores with all others, and with
whatever else the machine does: what it waits for may come later than it allows. Such a test is run once more alone, and
the suite is red if it fails again. Every other test has one try. Which ones had two is said at the end: one that needs
it more than once has to be mended.
"""

import subprocess
import sys
from collections.abc import Sequence
from typing import Final

import pytest

from tests.order import REAL

WORKERS: Final = 3

MOST: Final = 3
"""More than so many failures are no accident."""


class _Failures:
    """The tests that failed, as the workers tell."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.found:
            self.found.append(report.nodeid)


def once_more(failed: Sequence[str]) -> list[str]:
    """Which tests are tried again: all that failed, or none where trying again could not make the suite green."""
    return list(failed) if len(failed) <= MOST and all(each.startswith(REAL) for each in failed) else []


def main() -> int:
    failures = _Failures()
    ended = int(pytest.main(["-n", str(WORKERS), "--dist", "worksteal"], plugins=[failures]))
    again = once_more(failures.found)
    if ended != pytest.ExitCode.TESTS_FAILED or not again:
        return ended
    print(f"\nonce more, alone: {', '.join(again)}", flush=True)
    ended = subprocess.run([sys.executable, "-m", "pytest", *again], check=False).returncode
    if not ended:
        print(f"passed when tried again, with the machine to itself: {', '.join(again)}")
    return ended


if __name__ == "__main__":
    sys.exit(main())

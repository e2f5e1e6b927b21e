"""The whole suite, as `make test` runs it: three workers on two cores, and a second try for tests of real processes.

While two workers wait for processes and lines, the third computes (tests/order.py).

A test that starts, stops or kills processes, or slows their lines, shares its cores with all other tests and with
whatever else the machine does, so an event may come later than the test allows. Such a test is run once more alone, and
the suite fails if it fails again. All other tests have one try. The tests that had two are named at the end: mend a
test that needs a second try more than once.
"""

import subprocess
import sys
from collections.abc import Sequence
from typing import Final

import pytest

from tests.order import REAL, WORKERS

MAX_RETRIES: Final = 3
"""More failures than these are no accident."""


class _Failures:
    """The tests that failed."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.found:
            self.found.append(report.nodeid)


def once_more(failed: Sequence[str]) -> list[str]:
    """The tests to try again: all that failed, or none if the suite would fail anyway."""
    return list(failed) if len(failed) <= MAX_RETRIES and all(each.startswith(REAL) for each in failed) else []


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

"""`ravnest` without replicas: `python -m benchmarks.homes_parts.without_state serve …`.

Checkpoints and rounds can be switched off by settings, replicas cannot, because a run without them could not go on
after a fault. This program tells the coordinator that no replica is ever due. It is for comparisons alone.
"""

import sys
from typing import Final

from ravnest.cli.main import main
from ravnest.coordinator.replicas import tracker

SETTINGS: Final = ("checkpoint.every_seconds=none", "checkpoint.every_updates=none", "averaging.every=1000000000")
"""Settings of a run without checkpoints and rounds."""

DECISION: Final = "replica_due"
"""The function that decides when a replica is due, as the coordinator's tracker knows it."""


def _never_due(**_: object) -> tuple[bool, str]:
    return False, "benchmarks.homes compares with a run without replicas"


def use() -> None:
    """Switch replicas off in this process. AttributeError: the coordinator decides elsewhere when one is due."""
    getattr(tracker, DECISION)
    setattr(tracker, DECISION, _never_due)


if __name__ == "__main__":
    use()
    sys.exit(main())

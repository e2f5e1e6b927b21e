"""Other work of a stage: it reads its memory from the disk, because it is loading or its machine is swapping.

The counters of forwards, backwards and updates stand still meanwhile, and the major page faults that the stage reports
grow. That is progress, for a while: a stage may report anything, so the claim is bounded. Pure functions.
"""

from typing import Final

MIN_FAULTS: Final = 20
"""Fewer faults between two reports are no sign of work: any process has some."""
MAX_SECONDS: Final = 120.0
"""Time without a finished task for which page faults count as progress."""


def is_other_work(faults_before: int, faults: int, still_seconds: float) -> tuple[bool, str]:
    """Whether a stage works on something else than tasks, and why or why not. `still_seconds` is the time since it last
    finished a task."""
    grown = faults - faults_before
    if grown < MIN_FAULTS:
        return False, f"{max(0, grown)} page faults since its last report"
    if still_seconds > MAX_SECONDS:
        return False, f"it has been reading its memory from the disk for more than {MAX_SECONDS:.0f} s"
    return True, f"it reads its memory from the disk: {grown} page faults since its last report"

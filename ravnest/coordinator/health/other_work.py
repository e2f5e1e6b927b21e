"""Other work of a stage: it reads its memory from the disk, because it is loading or its machine is swapping.

The counters of forwards, backwards and updates stand still meanwhile, and the major page faults that the stage reports
grow. That is progress, for a while: a stage may report anything, so the time that such claims excuse is bounded.
"""

from typing import Final

MIN_FAULTS: Final = 20
"""Fewer faults between two reports are no sign of work: any process has some."""
MAX_SECONDS: Final = 120.0
"""Time without a finished task that page faults excuse within WINDOW_SECONDS."""
WINDOW_SECONDS: Final = 1800.0
_SLOT_SECONDS: Final = 60.0


class OtherWork:
    """The time that page faults have excused recently, for one stage."""

    def __init__(self) -> None:
        self._slots: dict[int, float] = {}
        """Excused seconds, by the number of the minute. As many entries as the window has minutes."""

    def is_work(self, grown_faults: int, still_seconds: float, now: float) -> tuple[bool, str]:
        """Whether a stage works on something else than tasks, and why or why not.

        `grown_faults` since its last report; `still_seconds` since it last finished a task or was excused: this time is
        excused now.
        """
        if grown_faults < MIN_FAULTS:
            return False, f"{max(0, grown_faults)} page faults since its last report"
        slot = int(now // _SLOT_SECONDS)
        oldest = slot - int(WINDOW_SECONDS // _SLOT_SECONDS)
        self._slots = {number: seconds for number, seconds in self._slots.items() if number >= oldest}
        still_seconds = max(0.0, still_seconds)
        if sum(self._slots.values()) + still_seconds > MAX_SECONDS:
            minutes = WINDOW_SECONDS / 60
            return (
                False,
                f"it has read its memory from the disk for {MAX_SECONDS:.0f} s in the last {minutes:.0f} minutes",
            )
        self._slots[slot] = self._slots.get(slot, 0.0) + still_seconds
        return True, f"it reads its memory from the disk: {grown_faults} page faults since its last report"

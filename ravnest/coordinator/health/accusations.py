"""Who goes when a stage says that its neighbour broke the rules: the one accused, or the one that accuses too often.

The coordinator does not see what flows between two stages, so it is one's word against the other's. The accused goes:
an honest stage accuses a neighbour only of a frame that cannot be. One that accuses a second neighbour goes itself, and
those who went on its word alone may come back. So a liar costs a run one honest machine at most, and only until it lies
again. Pure: no clock, and no messages.
"""

from typing import NamedTuple


class Verdict(NamedTuple):
    """What follows from an accusation."""

    culprit: str
    """Who gets no stage any more; empty where nothing follows."""
    reason: str
    cleared: tuple[str, ...] = ()
    """Who went on the word of the culprit alone, and may have a stage again."""


class Accusations:
    """Of one run."""

    def __init__(self) -> None:
        self._accused_by: dict[str, set[str]] = {}
        """By who was accused, who said so."""
        self._barred: dict[str, str] = {}
        """Who gets no stage any more, and why."""

    def barred(self, node_id: str) -> str:
        """Why this one gets no stage any more; empty where it may have one."""
        return self._barred.get(node_id, "")

    def judge(self, accuser: str, accused: str, what: str) -> Verdict:
        """A stage says that its neighbour broke the rules, and how."""
        if accuser in self._barred:
            return Verdict("", f"{accuser} broke the rules itself: what it says of {accused} is not believed")
        before = sorted(node for node, by in self._accused_by.items() if accuser in by and node != accused)
        self._accused_by.setdefault(accused, set()).add(accuser)
        if before:
            reason = f"{accuser} says of {accused}, as it did of {', '.join(before)}, that it broke the rules: {what}"
            cleared = tuple(node for node in [*before, accused] if self._accused_by[node] == {accuser})
            for node in cleared:
                self._barred.pop(node, None)
            self._barred[accuser] = reason
            return Verdict(accuser, f"{reason}; that many neighbours are not at fault", cleared)
        self._barred[accused] = f"{accuser} says: {what}"
        return Verdict(accused, f"{what} (as {accuser} says, which has the stage next to it)")

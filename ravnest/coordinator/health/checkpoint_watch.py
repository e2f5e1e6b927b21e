"""Watch over the parts of a checkpoint: a provider whose part does not come, though it was asked for, is given up.

A stage trains on while its state is uploaded, so the other watches see nothing of a checkpoint that never becomes
whole; but until that is done no other is taken, and a run cannot end. The coordinator counts what comes:
`state_traffic` says what counts as sending.

What happens on failure: where no other provider could take the place, the coordinator waits, and `standstill` says so.
"""

import time
from collections.abc import Callable
from typing import Final

from ravnest.coordinator.checkpoints.saver import Awaited
from ravnest.coordinator.health.lease import STILL_SECONDS, Replacement
from ravnest.coordinator.swarm.members import Members
from ravnest.coordinator.swarm.upload_activity import Sent, is_at_work, megabytes

_LOOK_SECONDS: Final = 1.0
_STOPPED_SECONDS: Final = 5.0


def judge_part(
    sent: Sent | None,
    still_seconds: float,
    line_bytes_per_second: float,
    replacement: Replacement,
    patience_seconds: float = 0.0,
) -> tuple[bool, str]:
    """Whether a provider whose part is awaited is to be given up, and why or why not.

    `sent` is its upload, None where there is none; `still_seconds` went by since it was asked, or something last came.
    `patience_seconds` is how long it may be before a stage has finished what it is at, and begins to save.
    """
    limit = max(STILL_SECONDS[replacement], patience_seconds)
    why = f"nothing of it has come for {still_seconds:.0f} s"
    if sent is not None:
        is_work, why = is_at_work(sent, line_bytes_per_second)
        why = f"{megabytes(sent.done_bytes)} have come, {why}"
        if is_work or sent.seconds < limit:
            return False, why
    elif still_seconds < limit:
        return False, why
    if replacement == "none":
        return False, f"{why}, and no other can take its place"
    return True, f"{why}, and {'a standby is ready' if replacement == 'standby' else 'the others can go on without it'}"


class CheckpointWatch:
    """Of one run. All methods belong to the network's loop."""

    def __init__(
        self,
        members: Members,
        awaited: Callable[[], Awaited | None],
        replacement: Callable[[str], Replacement],
        give_up: Callable[[str, str], None],
        patience_seconds: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`give_up` is told whom to do without, and why; `patience_seconds` is many times as long as a stage takes
        for a microbatch at the moment."""
        self._patience_seconds = patience_seconds
        self._members = members
        self._awaited = awaited
        self._replacement = replacement
        self._give_up = give_up
        self._clock = clock
        self._looked_at = 0.0
        self._began_at = 0.0
        """When there was something to look at again, or the coordinator was itself stopped last: what did not come
        until then is no provider's fault."""

    def look(self) -> None:
        """To be called several times a second."""
        now = self._clock()
        awaited = self._awaited() if now - self._looked_at >= _LOOK_SECONDS else None
        if awaited is None:
            return
        if now - self._looked_at > _STOPPED_SECONDS:
            self._began_at = now
        self._looked_at = now
        for node_id in awaited.nodes:
            if not self._members.is_present(node_id):
                continue
            uploads = self._members[node_id].uploads
            upload = next((up for up in uploads.under_way if up.name == awaited.name), None)
            still = now - max(awaited.asked_at, uploads.heard_at, self._began_at)
            sent = None if upload is None else upload.sent(now, since=self._began_at)
            rate = self._members.line_rate(node_id) or 0.0
            replacement = self._replacement(node_id)
            is_over, why = judge_part(sent, still, rate, replacement, self._patience_seconds())
            if is_over:
                asked = f"its state was asked for {now - awaited.asked_at:.0f} s ago ({awaited.name})"
                self._give_up(node_id, f"{asked}: {why}")

"""Watch over the parts of a checkpoint: it gives up a provider that was asked for its part and does not upload it.

A stage trains on while its state is uploaded, so no other watch sees a checkpoint that never becomes whole. Until it is
whole no other checkpoint begins, and the run cannot end. A slow line, or a line on which state yields to activations,
never costs a provider its place (`uploads.is_progressing`). A provider without a replacement is kept, and `standstill`
tells the user what the run waits for.
"""

import time
from collections.abc import Callable
from typing import Final

from ravnest.coordinator.checkpoints.saver import Awaited
from ravnest.coordinator.health.lease import Replacement
from ravnest.coordinator.health.stalls import DEFAULT_TIMEOUTS
from ravnest.coordinator.health.uploads import is_progressing, megabytes
from ravnest.coordinator.swarm.members import Members
from ravnest.coordinator.swarm.uploads import UploadProgress

_LOOK_SECONDS: Final = 1.0
SAVING_SECONDS: Final = 300.0
"""Time for which a stage may say that it copies or writes its state before the upload begins: disks are slow too."""
_STOPPED_SECONDS: Final = 5.0
"""A look that comes this late shows that the coordinator itself was stopped."""


def judge_part(
    upload: UploadProgress | None,
    still_seconds: float,
    line_bytes_per_second: float,
    replacement: Replacement,
    patience_seconds: float = 0.0,
    *,
    is_saving: bool = False,
) -> tuple[bool, str]:
    """Whether to give up a provider whose part is awaited, and why or why not.

    `upload` is None before the upload has begun; `still_seconds` is the time since the part was asked for, or since
    bytes last arrived. `patience_seconds` is the time that a stage may take for its task before it begins to save.
    `is_saving`: the stage reports that it copies or writes its state.
    """
    why = f"nothing has arrived for {still_seconds:.0f} s"
    is_working = False
    if upload is not None:
        is_working, why = is_progressing(upload, line_bytes_per_second)
        why = f"{megabytes(upload.done_bytes)} have arrived, {why}"
    elif is_saving and still_seconds < SAVING_SECONDS:
        return False, f"it has been saving its state for {still_seconds:.0f} s"
    if replacement == "none":
        return False, f"{why}, and no other provider can take its place"
    waited_seconds = still_seconds if upload is None else upload.seconds
    if is_working or waited_seconds < max(DEFAULT_TIMEOUTS.seconds(replacement), patience_seconds):
        return False, why
    return True, f"{why}, and {'a standby is ready' if replacement == 'standby' else 'the others can go on without it'}"


class CheckpointWatch:
    """Watch of one run. All methods run on the network's event loop."""

    def __init__(
        self,
        members: Members,
        awaited: Callable[[], Awaited | None],
        replacement: Callable[[str], Replacement],
        give_up: Callable[[str, str], None],
        patience_seconds: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`give_up(node_id, reason)` drops a provider; `patience_seconds` gives the time that a stage may take at
        present before it begins to save."""
        self._members = members
        self._awaited = awaited
        self._replacement = replacement
        self._give_up = give_up
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._looked_at = 0.0
        self._began_at = 0.0
        """When the watch last began, or the coordinator was last stopped itself: earlier silence does not count."""

    def look(self) -> None:
        """Judges the parts that are awaited. To be called several times a second."""
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
            member = self._members[node_id]
            uploads, health = member.uploads, member.health
            is_saving = health is not None and health.report is not None and health.report.activity.kind == "save"
            upload = uploads.named(awaited.name)
            still = now - max(awaited.asked_at, uploads.heard_at, self._began_at)
            progress = None if upload is None else upload.progress(now, since=self._began_at)
            rate = self._members.line_rate(node_id) or 0.0
            patience = self._patience_seconds()
            is_over, why = judge_part(progress, still, rate, self._replacement(node_id), patience, is_saving=is_saving)
            if is_over:
                asked = f"its state was asked for {now - awaited.asked_at:.0f} s ago ({awaited.name})"
                self._give_up(node_id, f"{asked}: {why}")

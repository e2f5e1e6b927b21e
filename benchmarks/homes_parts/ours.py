"""Runs of Ravnest on the homes of a case: as users start them, and the same without any traffic of state."""

from pathlib import Path
from typing import Final

from benchmarks.homes_parts.cases import Case
from benchmarks.homes_parts.models import BATCH
from benchmarks.homes_parts.reading import HomesRun, read_run
from benchmarks.homes_parts.swarm import HomesSwarm

_FINISH_SECONDS: Final = 900.0
"""Timeout for the end of a run: its last checkpoint has to travel to the requester."""


def run(case: Case, folder: Path, *, with_state: bool = True) -> HomesRun:
    """One run of a case. RuntimeError: the coordinator failed; TimeoutError: it never trained."""
    with HomesSwarm(folder, case.population, case.model, with_state=with_state) as swarm:
        swarm.wait_for_training()
        swarm.pass_time(case.settle_seconds)
        first = swarm.snapshot()
        swarm.pass_time(case.measure_seconds)
        last = swarm.snapshot()
        # The run without state ends here: what its last checkpoint takes is measured by the other one.
        finished = swarm.finish(_FINISH_SECONDS) if with_state else None
        found = read_run(
            swarm.watch.events(), swarm.watch.metrics(), swarm.summary(), first, last, BATCH, finish_seconds=finished
        )
    if not with_state and (found.replicas or found.rounds or found.checkpoint_seconds):
        raise RuntimeError(f"{case.name}: the run without state had replicas, rounds or checkpoints: {found}")
    return found

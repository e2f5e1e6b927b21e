"""Resuming from the providers' disks after a power cut, or whenever no stage survived a restart of the coordinator.

If the providers hold a replica that is newer than the last checkpoint, the run is deployed from their disks; nothing of
it passes through the coordinator. Providers may rejoin later than the coordinator, so it waits for those that are
missing (see `surviving.wait_for_holders`). If the replica cannot be used after all, an older one is, or the checkpoint.
"""

import asyncio
import contextlib

from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.replicas.sources import ReplicaSources
from ravnest.coordinator.replicas.surviving import (
    AnnouncedReplica,
    SurvivingReplica,
    absent_holders,
    find_surviving_replica,
    wait_for_holders,
)
from ravnest.coordinator.report.phase import Phase
from ravnest.coordinator.run.job_run import JobRun
from ravnest.graph.cutting.partition import split
from ravnest.units import duration


class SurvivingState:
    """The state on the providers' disks when a run begins. All methods run on the network's event loop."""

    def __init__(self, run: JobRun) -> None:
        self._run = run
        self._begin = run.context.ledger.applied
        """Position in the data of the newest checkpoint."""
        self._known: list[AnnouncedReplica] = []
        self._failed: set[tuple[str, int]] = set()
        self._used: SurvivingReplica | None = None
        self._excluded = run.exclusions.nodes
        """The providers that got no stage before any replica was tried."""

    async def find(self) -> ReplicaSources | None:
        """The sources of the newest replica that the providers hold, if it is newer than the checkpoint. The run then
        continues from its place in the data."""
        context, state = self._run.context, self._run.context.swarm.state
        if state is None:
            return None
        complete = [AnnouncedReplica.from_json(text) for text in await asyncio.to_thread(state.complete_replicas)]
        announced = [AnnouncedReplica.from_json(text) for text in await asyncio.to_thread(state.replicas)]
        self._known = [*complete, *announced]
        if not self._known:
            return None
        newest = max(complete, key=lambda each: each.place.updates, default=None)
        if newest is not None and newest.place.updates > self._begin.updates:
            await self._wait_for(newest)
        context.enter(Phase.RESUMING)
        found = await self._newest()
        if found is None:
            reason = (
                f"the providers hold no complete replica newer than the checkpoint of {self._begin.updates} updates"
            )
            context.emit("resumed_swarm", reason, updates=self._begin.updates, source="checkpoint")
        return found

    async def after_failure(self, left: ReplicaSources | None, reason: str) -> ReplicaSources | None:
        """The sources for the next attempt, because the last one failed for this reason: those that are `left` of the
        same replica, those of an older one, or none."""
        run, context = self._run, self._run.context
        for node_id in run.exclusions.nodes - self._excluded:
            # A damaged part is not the fault of the stage's machine. Each failure removes a source, so this ends.
            run.exclusions.forgive(node_id)
        if left is not None and left.replica.is_available(context.present):
            return left
        if self._used is not None:
            self._failed.add((self._used.announced.key, self._used.announced.number))
        context.emit("not_regained", f"the replica on the providers' disks cannot be used: {reason}")
        found = await self._newest()
        if found is None:
            continue_at(run, self._begin)
            run.checkpointer.wanted = ""
            context.emit(
                "resumed_swarm", f"from the checkpoint: {reason}", updates=self._begin.updates, source="checkpoint"
            )
        return found

    async def _newest(self) -> ReplicaSources | None:
        run, context = self._run, self._run.context
        members = context.members.in_order()
        found = self._used = find_surviving_replica(self._known, members, self._begin.updates, self._failed)
        if found is None:
            return None
        announced = found.announced
        context.emit("resumed_swarm", found.reason, updates=announced.place.updates, source="replica")
        context.say(f"resuming from a replica: {found.reason}")
        continue_at(run, announced.place)
        # The state may be on a single disk.
        run.checkpointer.wanted = "the run continues from what the providers had on their disks"
        graphs = await asyncio.to_thread(split, run.prepared.captured.graph, list(announced.starts[1:]))
        keys = [announced.part_key(stage) for stage in range(len(graphs))]
        return ReplicaSources.of(keys, graphs, found.replica)

    async def _wait_for(self, newest: AnnouncedReplica) -> None:
        """Waits for the providers without which this replica is incomplete, and says so."""
        run, context, members = self._run, self._run.context, self._run.context.members
        missing = absent_holders(newest, members.in_order())
        if not missing:
            return
        checkpoint = run.store.newest
        at = None if checkpoint is None else checkpoint.recorded_at
        limit_seconds = context.timeouts.return_limit_seconds
        seconds, otherwise = wait_for_holders(newest, self._begin.updates, at, limit_seconds)
        names = ", ".join(sorted({node for nodes in missing.values() for node in nodes}))
        text = (
            f"waiting up to {duration(seconds)} for {names}, who have stages of the state after "
            f"{newest.place.updates} updates; {otherwise}"
        )
        context.emit("waiting_for_replica", text, seconds=seconds, updates=newest.place.updates)
        context.say(text)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                back = members.changes.until(lambda: not absent_holders(newest, members.in_order()))
                await context.while_well(back)


def continue_at(run: JobRun, place: DataPosition) -> None:
    """A run that has fed nothing yet continues from this position in the data."""
    context = run.context
    context.ledger.begin_at(place)
    run.dispatcher.fed_place = place
    context.progress.clock.samples_at_start = context.ledger.samples

"""A run that is deployed over a swarm in this process, on nodes that hold their stages and compute nothing."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

from ravnest.coordinator.coordinator import Coordinator
from ravnest.coordinator.feed.ledger import Ledger
from ravnest.coordinator.plan.prepared_job import PreparedJob, prepare
from ravnest.coordinator.report.progress import Progress
from ravnest.coordinator.swarm.changes import Changes
from ravnest.graph.portable_reader import read_graph
from ravnest.monitor.display import QuietDisplay
from ravnest.monitor.events import Event, EventLog, read_events
from ravnest.monitor.metrics import MetricLog
from ravnest.monitor.run_directory import RunDirectory
from ravnest.net.v1.control_pb2 import Deploy, ProviderMessage
from tests.e2e.jobs import a_job, every_updates
from tests.swarms.in_process import Joined, LocalSwarm


class HeardEvents(EventLog):
    """The events of a run, also in memory, with a notice of each."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path
        self.changes = Changes()

    @property
    def heard(self) -> list[Event]:
        return read_events(self.path)

    def emit(self, kind: str, reason: str, /, **fields: object) -> None:
        super().emit(kind, reason, **fields)
        self.changes.notify()


class DeployedRun:
    """A run that listens to the swarm, its events, and who holds its stages."""

    def __init__(self, coordinator: Coordinator, events: HeardEvents) -> None:
        self.coordinator = coordinator
        self.events = events
        self.orders: dict[str, Deploy] = {}
        """By node, the order with its stage."""
        self.saving: dict[str, int] = {}
        """By node, the checkpoint that it was told to save its stage for."""
        self._changes = Changes()
        self._tasks: list[asyncio.Task[None]] = []

    async def deploy(self, nodes: Sequence[Joined]) -> None:
        """Deploys the job on these nodes, a stage each."""
        self._tasks += [asyncio.create_task(self._hold_a_stage(node)) for node in nodes]
        await self.coordinator.deploy(prepared(), len(nodes), 1, 1, 2)

    async def begin_to_save(self, count: int) -> None:
        """Returns when this many nodes have been told to save their stage."""
        self._tasks.append(asyncio.create_task(self._finish()))
        await self._changes.until(lambda: len(self.saving) == count)

    async def parameters_of(self, node: Joined) -> dict[str, tuple[int, ...]]:
        """The keys and shapes of the parameters of a node's stage."""
        data = b"".join([chunk async for chunk in node.client.fetch(self.orders[node.id].graph.id)])
        return {spec.key: tuple(spec.shape) for spec in read_graph(data).parameters}

    async def event(self, kind: str) -> Event:
        """The only event of this kind, once it is there."""
        await self.events.changes.until(lambda: any(event["kind"] == kind for event in self.events.heard))
        (found,) = (event for event in self.events.heard if event["kind"] == kind)
        return found

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.coordinator.close()

    async def _finish(self) -> None:
        await self.coordinator.finish()

    async def _hold_a_stage(self, node: Joined) -> None:
        while (message := await node.control.receive()) is not None:
            if message.HasField("deploy"):
                order = self.orders[node.id] = message.deploy
                ready = {"deployment": order.deployment, "generation": order.generation}
                await node.control.send(ProviderMessage(ready=ready))
            elif message.HasField("save"):
                self.saving[node.id] = message.save.checkpoint
                self._changes.notify()


@cache
def prepared() -> PreparedJob:
    """The job of all these runs, captured once: three layers."""
    return prepare(a_job(checkpoint=every_updates(1000)), 1, None, lambda phase: None)


@asynccontextmanager
async def a_run(swarm: LocalSwarm, folder: Path) -> AsyncIterator[DeployedRun]:
    """A run in this folder that listens to the swarm; nothing is deployed yet."""
    with RunDirectory.open(folder / "run", job_name="job", resume=False) as directory:
        events, metrics = HeardEvents(directory.events_path), MetricLog(directory.metrics_path)
        progress = Progress("job", 1, Ledger())
        coordinator = Coordinator(swarm.swarm, directory, events, metrics, progress, QuietDisplay())
        await coordinator.start()
        made = DeployedRun(coordinator, events)
        try:
            yield made
        finally:
            await made.close()
            events.close()
            metrics.close(1.0)

"""Intake: takes the items of the requester's data one by one, each once there is room for it.

An evaluation waits until everything before it has been applied. The end waits until all clusters have the same model,
and saves it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from ravnest.coordinator.checkpoints.reader import CheckpointInfo
from ravnest.coordinator.deploy.average_now import average_now
from ravnest.coordinator.deploy.current_deployment import CurrentDeployment
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.feed.evaluation_scores import Evaluation
from ravnest.coordinator.feed.feeder import EpochEnd, EvalBatch, EvalEnd, Item, TrainBatch
from ravnest.coordinator.report.phase import Phase
from ravnest.coordinator.run.job_run import JobRun
from ravnest.coordinator.verification.reported_scores import ReportedScores, Witness
from ravnest.errors import RefusedError
from ravnest.graph.batch import samples_in
from ravnest.net.frames.frames import Frame

_FIRST_ATTESTED: Final = 1 << 40
"""Batches that are evaluated only for the check of the model have the negative numbers from here on, which no batch of
the data has."""


class Intake:
    """The intake of one run. All methods run on the network's event loop."""

    def __init__(self, run: JobRun, current: CurrentDeployment) -> None:
        self._run = run
        self._context = run.context
        self._current = current
        self._walk = run.walk
        self._witness = Witness()
        self._attested = 0
        self._scores = {"loss", *run.prepared.job.metrics}
        """The names of the scores of an evaluation."""

    async def take(self, item: Item) -> None:
        """Takes the next item, once there is room for it."""
        if isinstance(item, TrainBatch):
            await self._take_batch(item)
        elif isinstance(item, EvalBatch):
            await self._take_evaluation(item)
        elif isinstance(item, EvalEnd):
            await self._end_evaluation()
        elif isinstance(item, EpochEnd):
            self._end_epoch(item)

    async def finish(self) -> CheckpointInfo:
        """Waits for everything in flight, makes all clusters equal, and saves the final state."""
        await self._until_drained()
        self._walk.is_finishing = True
        try:
            self._context.progress.clock.pause()
            since = time.monotonic()
            await average_now(self._context, self._current, "at the end")
            self._context.enter_fed(Phase.SAVING)
            info = await self._run.checkpointer.now()
            if len(self._current.clusters) > 1:
                # The clusters that are not saved report their last counts, too.
                await self._context.until(lambda: all(map(self._has_reported(since), self._current.stage_of)))
            return info
        finally:
            self._walk.is_finishing = False

    async def attest(
        self,
        batches: Sequence[Mapping[str, torch.Tensor]],
        shorten: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None,
    ) -> None:
        """Makes sure that the swarm has evaluated the model that is about to be saved, so that its file can be checked.

        If the run has no evaluation data, the swarm evaluates a few batches that it trained on, or these `batches`.
        With `shorten`, the evaluation was too large to be repeated: the swarm evaluates a part of one batch.
        """
        await self._until_drained()
        known = self._witness.current
        if known and shorten is None:
            return
        source = self._witness.source if known else "train_data"
        chosen = [each.batch.tensors for each in known[:1]] or self._witness.training_batches or batches
        self._witness.begin(source)
        for tensors in chosen if shorten is None else [shorten(chosen[0])]:
            self._attested += 1
            await self._take_evaluation(EvalBatch(-_FIRST_ATTESTED - self._attested, tensors, samples_in(tensors)))
        evaluation = self._walk.evaluation
        if evaluation is not None:
            await self._context.until(lambda: evaluation.outstanding == 0)
            self._walk.evaluation = None
            self._current.now.in_flight.restart()

    def witnessed(self) -> tuple[list[ReportedScores], str]:
        """The scores that the swarm reported of the model that was saved last, and the data that they are of."""
        found, averaging = self._witness.current, self._current.now.averaging
        if averaging is not None and not averaging.is_averaged:
            # The other clusters have other models than the one that is saved.
            found = [each for each in found if each.provider in self._run.checkpointer.nodes]
        return found, self._witness.source

    def evaluated(self, cluster: ClusterRun, node_id: str, frame: Frame) -> None:
        """A leaf reports its scores of one batch. RefusedError if these are other scores than those asked for."""
        evaluation = self._walk.evaluation
        if evaluation is None:
            return
        if frame.scalars.keys() != self._scores:
            raise RefusedError(f"{node_id} sent other scores than {sorted(self._scores)}")
        if cluster.evaluating.pop(frame.microbatch, None) is not None:
            scores = {k: float(v) for k, v in frame.scalars.items()}
            evaluation.came(frame.microbatch, scores)
            self._witness.came(frame.microbatch, node_id, scores)
            self._context.notify()

    async def _take_batch(self, item: TrainBatch) -> None:
        dispatcher = self._run.dispatcher
        while dispatcher.paused and dispatcher.clusters.group is None:
            await self._context.until(lambda: not dispatcher.paused)
        if (averaging := self._current.now.averaging) is not None:
            await averaging.before_batch()
        await self._run.checkpointer.room_for(item.after)
        self._witness.trained(item.microbatch, item.tensors, item.samples)
        await dispatcher.batch(item, lambda: self._checkpoint_with(item))

    def _checkpoint_with(self, item: TrainBatch) -> int:
        """The number of the checkpoint to take with this microbatch, or 0. With several clusters, checkpoints follow
        rounds of averaging instead."""
        dispatcher = self._run.dispatcher
        if len(self._current.clusters) > 1 or dispatcher.replaying or dispatcher.claims:
            return 0
        number = self._run.checkpointer.with_microbatch(item)
        if number:
            self._current.now.in_flight.restart()
        return number

    async def _take_evaluation(self, item: EvalBatch) -> None:
        if self._walk.evaluation is None:
            await self._until_drained()
            # From now on, no round begins and no redeployment for gain.
            self._walk.evaluation = Evaluation()
            self._context.progress.clock.pause()
            self._current.now.in_flight.restart()
            await average_now(self._context, self._current, "before an evaluation")
            self._context.enter_fed(Phase.EVALUATING)
            if -item.microbatch < _FIRST_ATTESTED:
                self._witness.begin("eval_data")
        self._witness.fed(item)
        self._walk.evaluation.sent(item.microbatch, item.samples)
        await self._run.dispatcher.evaluation(item)

    async def _end_evaluation(self) -> None:
        evaluation = self._walk.evaluation
        if evaluation is None:
            self._context.emit("evaluated", "eval_data is empty: there is nothing to evaluate on")
            self._context.say("eval_data is empty: nothing was evaluated")
            return
        await self._context.until(lambda: evaluation.outstanding == 0)
        self._walk.evaluation = None
        self._current.now.in_flight.restart()
        means = evaluation.means()
        self._context.recorder.evaluated(means)
        self._context.emit("evaluated", f"on {evaluation.samples} samples", **means)
        self._context.enter_fed(Phase.TRAINING)

    def _end_epoch(self, item: EpochEnd) -> None:
        epochs = self._context.progress.epochs
        epochs.batches = item.batches
        if item.samples is not None:
            epochs.samples = item.samples
        self._context.ledger.end_epoch(item.after)
        self._run.dispatcher.fed_place = item.after
        self._context.emit("epoch", f"epoch {item.after.epoch} has been fed", samples=item.after.samples)

    async def _until_drained(self) -> None:
        """Returns when all stages have applied all that was fed, and no redeployment is about to begin."""

        def is_drained() -> bool:
            # A redeployment that has paused the dispatcher waits for the end of an update that has begun.
            is_paused = bool(self._run.dispatcher.paused) and self._current.now.clusters.group is None
            return self._current.now.is_drained and not is_paused

        while not is_drained():
            await self._context.until(is_drained)

    def _has_reported(self, since: float) -> Callable[[str], bool]:
        records = self._context.members.records
        return lambda node_id: (records[node_id].reported_at or 0.0) > since

"""What the data brings: microbatches to train on, batches to evaluate, ends of epochs, and the end of it all.

Each waits for its place: an evaluation for everything before it to be applied, the end for all clusters to be alike.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from ravnest.coordinator.checkpoints.store import CheckpointInfo
from ravnest.coordinator.deploy.deployment import Deployment
from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.feed.evaluation import Evaluation
from ravnest.coordinator.feed.feeder import EpochEnd, EvalBatch, EvalEnd, Item, TrainBatch
from ravnest.coordinator.report.progress import Progress
from ravnest.coordinator.report.recorder import Recorder
from ravnest.coordinator.run.context import Course
from ravnest.coordinator.verification.reported_scores import Witness
from ravnest.errors import RefusedError
from ravnest.graph.batch import samples_in
from ravnest.monitor.display import Display
from ravnest.net.frames.frames import Frame

_FIRST_ATTESTED: Final = 1 << 40
"""Batches that are evaluated for the check alone are numbered from here down: far from those of the data."""


class Intake:
    """Of one run. All methods belong to the network's loop."""

    def __init__(
        self,
        course: Course,
        formation: Callable[[], Deployment],
        progress: Progress,
        recorder: Recorder,
        display: Display,
        phase: Callable[[str], None],
        reported_at: Callable[[str], float],
    ) -> None:
        """`formation` is the one of now; `phase` says what the run is doing; `reported_at` is when a provider
        last did."""
        self.evaluation: Evaluation | None = None
        """The one under way."""
        self.finishing = False
        self.witness = Witness()
        self._attested = 0
        self.scores: set[str] = set()
        """What an evaluation measures."""
        self._course = course
        self._formation = formation
        self._progress = progress
        self._recorder = recorder
        self._display = display
        self._phase = phase
        self._reported_at = reported_at

    @property
    def _now(self) -> Deployment:
        return self._formation()

    async def take(self, item: Item) -> None:
        """Takes the next one, once there is room for it."""
        if isinstance(item, TrainBatch):
            await self._take_batch(item)
        elif isinstance(item, EvalBatch):
            await self._take_evaluation(item)
        elif isinstance(item, EvalEnd):
            await self._end_evaluation()
        elif isinstance(item, EpochEnd):
            self._end_epoch(item)

    async def finish(self) -> CheckpointInfo:
        """Waits for what is in flight, makes all clusters alike, and saves that."""
        await self._until_at_rest()
        self.finishing = True
        try:
            self._progress.clock.pause()
            since = time.monotonic()
            await self.average("at the end")
            self._phase("saving")
            info = await self._now.checkpointing.now()
            if len(self._now.clusters.whole) > 1:
                # Those that are not saved have something to report, too: the last of what they did.
                await self._course.until(lambda: all(self._reported_at(node) > since for node in self._now.stage_of))
            return info
        finally:
            self.finishing = False

    async def attest(
        self,
        batches: Sequence[Mapping[str, torch.Tensor]],
        shorten: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None,
    ) -> None:
        """Sees to it that the swarm has evaluated something of the model as it is about to be saved: a few batches that
        it trained on, or these, where it has not. With `shorten`, what it has evaluated is too much to be checked: it
        evaluates a part of a batch again."""
        await self._until_at_rest()
        known = self.witness.current
        if known and shorten is None:
            return
        source = self.witness.source if known else "train_data"
        chosen = [each.batch.tensors for each in known[:1]] or self.witness.training_batches or batches
        self.witness.begin(source)
        for tensors in chosen if shorten is None else [shorten(chosen[0])]:
            self._attested += 1
            await self._take_evaluation(EvalBatch(-_FIRST_ATTESTED - self._attested, tensors, samples_in(tensors)))
        evaluation = self.evaluation
        if evaluation is not None:
            await self._course.until(lambda: evaluation.outstanding == 0)
            self.evaluation = None
            self._now.flights.restart()

    async def average(self, reason: str) -> None:
        """Makes all clusters alike; nothing is in flight."""
        while (averaging := self._now.averaging) is not None:
            self._phase("averaging")
            await averaging.now(reason)
            if averaging is self._now.averaging:
                return
            # It was formed anew meanwhile.
            await self._course.until(lambda: self._now.is_settled)

    def evaluated(self, cluster: ClusterRun, node_id: str, frame: Frame) -> None:
        """What a leaf has measured on one batch. RefusedError where that is something else than was asked for."""
        if self.evaluation is None:
            return
        if frame.scalars.keys() != self.scores:
            raise RefusedError(f"{node_id} sent a result of other measures than {sorted(self.scores)}")
        if cluster.evaluating.pop(frame.microbatch, None) is not None:
            scores = {k: float(v) for k, v in frame.scalars.items()}
            self.evaluation.came(frame.microbatch, scores)
            self.witness.came(frame.microbatch, node_id, scores)
            self._course.notify()

    async def _take_batch(self, item: TrainBatch) -> None:
        while self._now.feeding.paused and self._now.clusters.group is None:
            await self._course.until(lambda: not self._now.feeding.paused)
        if self._now.averaging is not None:
            await self._now.averaging.before_batch()
        await self._now.checkpointing.room_for(item.after)
        self.witness.trained(item.microbatch, item.tensors, item.samples)
        await self._now.feeding.batch(item, lambda: self._checkpoint_with(item))

    def _checkpoint_with(self, item: TrainBatch) -> int:
        """The number of the checkpoint to be taken with this microbatch, or 0: of several clusters, after a round."""
        formation = self._now
        if len(formation.clusters.whole) > 1 or formation.feeding.replaying or formation.feeding.claims:
            return 0
        number = formation.checkpointing.with_microbatch(item)
        if number:
            formation.flights.restart()
        return number

    async def _take_evaluation(self, item: EvalBatch) -> None:
        if self.evaluation is None:
            await self._until_at_rest()
            # From now on nobody else begins to average, or forms the run anew because it pays.
            self.evaluation = Evaluation()
            self._progress.clock.pause()
            self._now.flights.restart()
            await self.average("before an evaluation")
            self._phase("evaluating")
            if -item.microbatch < _FIRST_ATTESTED:
                self.witness.begin("eval_data")
        self.witness.fed(item)
        self.evaluation.sent(item.microbatch, item.samples)
        await self._now.feeding.evaluation(item)

    async def _end_evaluation(self) -> None:
        evaluation = self.evaluation
        if evaluation is None:
            self._course.emit("evaluated", "eval_data is empty: there is nothing to evaluate on")
            self._display.message("eval_data is empty: nothing was evaluated")
            return
        await self._course.until(lambda: evaluation.outstanding == 0)
        self.evaluation = None
        self._now.flights.restart()
        means = evaluation.means()
        self._recorder.evaluated(means)
        self._course.emit("evaluated", f"on {evaluation.samples} samples", **means)
        self._phase("training")

    def _end_epoch(self, item: EpochEnd) -> None:
        self._progress.epochs.batches = item.batches
        if item.samples is not None:
            self._progress.epochs.samples = item.samples
        self._progress.ledger.end_epoch(item.after)
        self._now.feeding.fed_place = item.after
        self._course.emit("epoch", f"epoch {item.after.epoch} has been fed", samples=item.after.samples)

    async def _until_at_rest(self) -> None:
        """Nothing is under way, nor about to be formed anew; so it is when this returns."""

        def rests() -> bool:
            # Whoever wants to form the run anew waits for the end of an update that has begun.
            is_paused = self._now.feeding.paused and self._now.clusters.group is None
            return self._now.is_settled and not is_paused

        while not rests():
            await self._course.until(rests)

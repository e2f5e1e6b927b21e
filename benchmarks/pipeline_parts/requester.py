"""Ravnest's coordinator in benchmarks.pipeline, on a host of its own: it trains one job after another.

It uses the product's own swarm, sessions and plans; its providers are `ravnest join` processes on other hosts. It
communicates in lines of JSON: it prints its invite, reads the order for a run, prints the measurement, and so on until
the input ends. A measurement covers the time between the first seconds and the end of the data, without the filling
and draining of the pipeline.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ravnest
from benchmarks.models import Batch
from benchmarks.pipeline_parts.models import TASKS, Task, cut_blocks
from benchmarks.pipeline_parts.steady import Moment, StageMoment, steady
from ravnest.coordinator.access.admission import Admission
from ravnest.coordinator.launch.choose_display import choose_display
from ravnest.coordinator.launch.interrupts import Interrupts
from ravnest.coordinator.launch.network_loop import NetworkLoop
from ravnest.coordinator.launch.session import RunRequest, run_session
from ravnest.coordinator.report.progress import Progress
from ravnest.coordinator.swarm.swarm import Swarm
from ravnest.errors import RavnestError


def main() -> None:
    given = _arguments()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        loop = stack.enter_context(NetworkLoop())
        admission = Admission.in_memory()
        swarm = Swarm(admission)
        port = loop.call(swarm.start(given.host))
        stack.callback(lambda: loop.call_quietly(swarm.stop("the benchmark is over")))
        invite = admission.invite(given.host, port, uses=given.providers, lifetime_seconds=None)
        interrupts = stack.enter_context(Interrupts())
        _say(invite.line)
        for number, line in enumerate(sys.stdin):
            order = json.loads(line)
            try:
                _say(_trained(order, Path(given.folder, f"run-{number}"), swarm, loop, interrupts))
            except (RavnestError, ValueError) as error:
                _say({"failed": str(error)})


def _trained(order: dict[str, Any], run: Path, swarm: Swarm, loop: NetworkLoop, interrupts: Interrupts) -> object:
    task, stages = TASKS[order["task"]], order["stages"]
    data = _Timed(task, order["warm_seconds"] + order["seconds"])
    cuts = tuple(f"blocks.{block}" for block in cut_blocks(stages, task.blocks))
    job = ravnest.Job(
        model=task.model(),
        loss=task.loss,
        train_data=data,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        checkpoint=ravnest.Checkpoint(every_seconds=None),
        pipeline=ravnest.Pipeline(cuts=cuts, **order["pipeline"]),
    )
    with ExitStack() as stack:
        display = choose_display(enabled=False, plain=False)
        stack.callback(display.close)
        request = RunRequest(job, "pipeline", run, False, time.perf_counter())
        session = stack.enter_context(run_session(swarm, loop, request, display, interrupts))
        progress = session.coordinator.progress
        moments = _watched(progress)
        summary = session.train(stages, 1, None).summary
        assert summary.status == "finished" and progress.plan is not None, summary.reason
        begins = _first_blocks(progress)
        measured = steady(moments, data.began + order["warm_seconds"], data.ended)
    links = [link for stage in summary.clusters[0].stages for link in stage.links]
    return {
        "microbatches_per_second": measured.microbatches_per_second,
        "microbatches": measured.microbatches,
        "busy": list(measured.busy),
        "in_flight": measured.in_flight or progress.plan.clusters[0].in_flight,
        "staleness_max": max(stage.staleness.max for stage in summary.clusters[0].stages),
        "bytes_per_microbatch": max((link.bytes_sent for link in links), default=0) / max(1, summary.ledger.completed),
        "predicted": (summary.predicted_samples_per_second or 0.0) / task.samples,
        "begins": begins,
    }


def _watched(progress: Progress) -> list[Moment]:
    """A list that records the completion of each further microbatch, with the latest reports of the stages."""
    moments: list[Moment] = []
    completed = progress.clock.on_microbatch

    def noted() -> None:
        completed()
        stages = [progress.reports.get(stage.node) for stage in (progress.plan.stages if progress.plan else ())]
        seen = tuple(StageMoment(each.seconds, each.busy_seconds) for each in stages if each is not None)
        root = next((each.in_flight for each in stages if each is not None), 0)
        moments.append(Moment(time.perf_counter(), seen, root))

    # The progress has no callback, and the benchmark has to see every microbatch.
    setattr(progress.clock, "on_microbatch", noted)  # noqa: B010
    return moments


def _first_blocks(progress: Progress) -> list[str]:
    """The first parameter of every stage but the first, as the plan cut the model."""
    assert progress.plan is not None
    return [stage.graph.parameters[0].key for stage in progress.plan.clusters[0].stages[1:]]


class _Timed:
    """The task's batches, repeated until this many seconds after the first one."""

    def __init__(self, task: Task, seconds: float) -> None:
        self.began = self.ended = 0.0
        self._batches = task.batches()
        self._seconds = seconds

    def __iter__(self) -> Iterator[Batch]:
        # The clock starts with each pass, because the first batches are read before training.
        self.began = time.perf_counter()
        for batch in itertools.cycle(self._batches):
            if time.perf_counter() >= self.began + self._seconds:
                break
            yield batch
        self.ended = time.perf_counter()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("host")
    parser.add_argument("providers", type=int)
    parser.add_argument("folder")
    return parser.parse_args()


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

"""Process of one stage of torch.distributed.pipelining over gloo in benchmarks.pipeline, on a host of its own.

It communicates in lines of JSON: it prints "ready", reads a task, a number of stages, a schedule and a number of steps,
prints the time of each step including the optimizer, and so on until the input ends. All schedules of a task and a
number of stages use the same module and connections. A process beyond the number of stages does nothing.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from benchmarks.pipeline_parts.models import TASKS, Task, stage_module
from ravnest.engine.speed.pretended_pace import Pace, Pretence, StageSeconds

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


class PacedStage(PipelineStage):
    """A stage whose forwards and backwards take the time of the pace, without receiving and sending."""

    pace = Pace()

    def forward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        with self.pace.work("forward"):
            return super().forward_one_chunk(*arguments, **named)

    def backward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        with self.pace.work("backward"):
            return super().backward_one_chunk(*arguments, **named)


@dataclass
class Contender:
    """A stage of some task, with its optimizer."""

    task: Task
    stage: PacedStage
    optimizer: torch.optim.Optimizer
    group: Any
    microbatches: int
    schedules: dict[str, PipelineScheduleSingle] = field(default_factory=dict)

    def step(self, name: str) -> float:
        """Seconds from the time when all stages are ready until this one has updated its weights."""
        if name not in self.schedules:
            self.schedules[name] = SCHEDULES[name](self.stage, self.microbatches, loss_fn=self.task.loss)
        batches = (self.task.batches() * self.microbatches)[: self.microbatches]
        inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
        dist.barrier(self.group)
        began = time.perf_counter()
        if self.stage.is_first:
            self.schedules[name].step(inputs)
        elif self.stage.is_last:
            self.schedules[name].step(target=targets, losses=[])
        else:
            self.schedules[name].step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began


def main() -> None:
    given = _arguments()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = given.interface
    meeting = Path(given.meeting).absolute().as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=given.rank, world_size=given.count)
    groups = {stages: dist.new_group(list(range(stages))) for stages in map(int, given.stages.split(","))}
    contenders: dict[tuple[str, int], Contender] = {}
    _say("ready")
    while line := sys.stdin.readline():
        order = json.loads(line)
        key = task, stages = order["task"], order["stages"]
        if given.rank >= stages:
            _say({"seconds": [], "overruns": 0})
            continue
        if key not in contenders:
            contenders[key] = _contender(TASKS[task], given.rank, stages, groups[stages], given.microbatches)
        contender = contenders[key]
        pace = Pace(Pretence(seconds=StageSeconds(*order["pace"])) if order["pace"] else Pretence())
        contender.stage.pace = pace
        seconds = [contender.step(order["schedule"]) for _ in range(order["steps"])]
        _say({"seconds": seconds, "overruns": pace.overruns})
    dist.destroy_process_group()


def _contender(task: Task, rank: int, stages: int, group: Any, microbatches: int) -> Contender:
    module = stage_module(task.model(), rank, stages)
    stage = PacedStage(module, rank, stages, torch.device("cpu"), group=group)
    return Contender(task, stage, torch.optim.AdamW(module.parameters(), lr=1e-3), group, microbatches)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("meeting", help="file for the rendezvous, on a disk that all stages share")
    parser.add_argument("interface")
    parser.add_argument("rank", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("stages", help="possible numbers of stages, separated by commas")
    parser.add_argument("microbatches", type=int, help="microbatches in a step")
    return parser.parse_args()


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()

"""Process of one stage of torch.distributed.pipelining with 1F1B over gloo in benchmarks.scale.

    python -m benchmarks.scale_parts.torch_stage TASK RANK CUTS MICROBATCHES STEPS MEETING

CUTS are the first pieces of all stages but the first, separated by commas. A step is synchronous: several microbatches,
and one update with the sum of their gradients. A weight that the first and the last stage share exists on both, and
their gradients are added before the update, as Megatron-LM does. The process keeps only its own pieces, and its peak
memory counts from then on.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.scale_parts.memory import forget_peak, peak_bytes
from benchmarks.scale_parts.tasks import TASKS, Task, optimizer_of

_WARM_STEPS = 1


def main() -> None:
    task, rank, cuts = TASKS[sys.argv[1]], int(sys.argv[2]), [int(cut) for cut in sys.argv[3].split(",")]
    microbatches, steps = int(sys.argv[4]), int(sys.argv[5])
    stages = len(cuts) + 1
    torch.set_num_threads(1)
    module, shared = stage_module(task, rank, cuts)
    forget_peak()
    dist.init_process_group("gloo", init_method=Path(sys.argv[6]).as_uri(), rank=rank, world_size=stages)
    ends = dist.new_group([0, stages - 1])
    stage = PipelineStage(module, rank, stages, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=task.loss)
    optimizer = optimizer_of(module.parameters())
    batches = (task.batches() * microbatches)[:microbatches]
    inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
    began = 0.0
    for step in range(_WARM_STEPS + steps):
        if step == _WARM_STEPS:
            dist.barrier()
            began = time.perf_counter()
        if stage.is_first:
            schedule.step(inputs)
        elif stage.is_last:
            schedule.step(target=targets, losses=[])
        else:
            schedule.step()
        if shared is not None and shared.grad is not None:
            dist.all_reduce(shared.grad, group=ends)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    rate = steps * microbatches * task.samples / (time.perf_counter() - began)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    print(json.dumps({"samples_per_second": rate, "peak_bytes": peak_bytes(), "parameters": parameters}), flush=True)
    dist.destroy_process_group()


class _DenseGradient(torch.autograd.Function):
    """Hands values on, and makes their gradient dense: gloo sends and receives only dense memory."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


class _Received(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _DenseGradient.apply(values)  # type: ignore[no-untyped-call]
        return found


def stage_module(task: Task, rank: int, cuts: Sequence[int]) -> tuple[nn.Sequential, nn.Parameter | None]:
    """The pieces of one stage, and its copy of a weight that the first and the last stage share, if it has one."""
    model = task.build().train()
    pieces = task.pieces(model)
    bounds = (0, *cuts, len(pieces))
    own = nn.Sequential(_Received(), *(piece.module for piece in pieces[bounds[rank] : bounds[rank + 1]]))
    if task.tied is None or rank not in (0, len(cuts)):
        return own, None
    return own, model.get_parameter(task.tied[0])


if __name__ == "__main__":
    main()

"""Process of plain PyTorch in benchmarks.scale: it trains one task, and prints its rate and its peak memory.

python -m benchmarks.scale_parts.plain TASK THREADS STEPS
"""

import json
import sys
import time

import torch

from benchmarks.models import Repeated
from benchmarks.scale_parts.memory import peak_bytes
from benchmarks.scale_parts.tasks import TASKS, optimizer_of

_WARM_STEPS = 2


def main() -> None:
    task, steps = TASKS[sys.argv[1]], int(sys.argv[3])
    torch.set_num_threads(int(sys.argv[2]))
    model = task.build().train()
    optimizer = optimizer_of(model.parameters())
    started = 0.0
    for step, (inputs, targets) in enumerate(Repeated(task.batches(), steps + _WARM_STEPS)):
        if step == _WARM_STEPS:
            started = time.perf_counter()
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    rate = steps * task.samples / (time.perf_counter() - started)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"samples_per_second": rate, "peak_bytes": peak_bytes(), "parameters": parameters}), flush=True)


if __name__ == "__main__":
    main()

"""Plain PyTorch loop for comparison with Ravnest, in a process of its own, which has its own threads.

`PlainLoop` starts the process, which imports torch, builds the case and then waits for "measure" on its standard input.
"""

import json
import os
import subprocess
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from benchmarks.report import ROOT

if TYPE_CHECKING:
    import torch


class PlainLoop:
    """A process that trains one case of benchmarks/cases.py with `threads` threads, once for each `measure`."""

    def __init__(self, case: str, threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "benchmarks.plain", case, str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def measure(self, steps: int) -> float:
        """Samples/s over this many steps, after two steps of warm-up."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(steps, file=self._process.stdin, flush=True)
        return float(json.loads(self._process.stdout.readline()))


def _measure(case: str, steps: int) -> float:
    import torch

    from benchmarks.cases import CASES, GPU_CASES
    from benchmarks.models import Repeated

    chosen = (CASES | GPU_CASES)[case]
    job, device = chosen.job(steps), torch.device(chosen.device)
    assert isinstance(job.train_data, Repeated)
    model = job.model.train().to(device)
    optimizer = job.optimizer(model.parameters())
    mixed = torch.autocast(device.type, getattr(torch, job.pipeline.precision), job.pipeline.precision != "float32")
    samples, started = 0, 0.0
    for step, (inputs, targets) in enumerate(Repeated(job.train_data.batches, steps + 2)):
        if step == 2:
            _wait_for(device)
            samples, started = 0, time.perf_counter()
        optimizer.zero_grad()
        with mixed:
            loss = job.loss(model(inputs.to(device)), targets.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        samples += len(inputs)
    _wait_for(device)
    return samples / (time.perf_counter() - started)


def _wait_for(device: "torch.device") -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _main() -> None:
    import torch

    torch.set_num_threads(int(sys.argv[2]))
    for line in sys.stdin:
        print(json.dumps(_measure(sys.argv[1], int(line))), flush=True)


if __name__ == "__main__":
    _main()

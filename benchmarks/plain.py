"""The plain PyTorch loop that Ravnest is compared with, in a process of its own so that its threads are its own.

`PlainLoop` starts the process; it imports torch, builds the case and then waits for "measure" on its standard input.
"""

import json
import os
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

from benchmarks.report import ROOT


class PlainLoop:
    """A process that trains one case of benchmarks/cases.py with `threads` threads, each time it is asked to."""

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
        """Samples/s over so many steps, after two that are not counted."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(steps, file=self._process.stdin, flush=True)
        return float(json.loads(self._process.stdout.readline()))


def _measure(case: str, steps: int) -> float:
    from benchmarks.cases import CASES
    from benchmarks.models import Repeated

    job = CASES[case].job(steps)
    assert isinstance(job.train_data, Repeated)
    model, optimizer = job.model.train(), job.optimizer(job.model.parameters())
    samples, started = 0, 0.0
    for step, (inputs, targets) in enumerate(Repeated(job.train_data.batches, steps + 2)):
        if step == 2:
            samples, started = 0, time.perf_counter()
        optimizer.zero_grad()
        loss = job.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        samples += len(inputs)
    return samples / (time.perf_counter() - started)


def _main() -> None:
    import torch

    torch.set_num_threads(int(sys.argv[2]))
    for line in sys.stdin:
        print(json.dumps(_measure(sys.argv[1], int(line))), flush=True)


if __name__ == "__main__":
    _main()

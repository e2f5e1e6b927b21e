"""Overhead: throughput of Ravnest relative to a plain PyTorch loop, and the time to the demo's first update.

Each case alternates between the two several times in one invocation, so that a busy machine slows both; the ratio is
the median of the pairs' ratios. Ravnest runs as an embedded swarm, and its figures come from summary.json.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.cases import CASES, GPU_CASES, Case
from benchmarks.plain import PlainLoop
from benchmarks.report import ROOT, Row, Target, arguments, finish, say
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.monitor.events import read_events

_FIRST_UPDATE = "first-update"
_FIRST_UPDATE_SECONDS = 12.0


def main() -> int:
    cases = {**CASES, **(GPU_CASES if torch.cuda.is_available() else {})}
    given = arguments("overhead", "Throughput of Ravnest relative to a plain PyTorch loop.", [*cases, _FIRST_UPDATE])
    rows: list[Row] = []
    targets: list[Target] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.only:
            if name == _FIRST_UPDATE:
                continue
            case = cases[name]
            # Exactly the providers of the case: standbys would receive replicas on the same cores.
            with (
                EmbeddedSwarm(case.providers, devices=(case.device,)) as swarm,
                PlainLoop(name, case.plain_threads) as loop,
            ):
                row, ratio = _compare(case, loop, swarm, Path(folder, name), given.quick)
            rows.append(row)
            targets.append(Target(f"{case.title}: ratio", ratio, case.ratio))
        if _FIRST_UPDATE in given.only:
            demos = [_first_update(Path(folder, f"demo-{i}")) for i in range(1 if given.quick else 3)]
            seconds, what = statistics.median(demos), "seconds from the command to the first update"
            rows.append({"case": "digits CNN, 3 providers, first update", "seconds": seconds})
            targets.append(Target(what, seconds, _FIRST_UPDATE_SECONDS, at_most=True))
    return finish("overhead", given, rows, targets)


def _compare(case: Case, loop: PlainLoop, swarm: EmbeddedSwarm, folder: Path, quick: bool) -> tuple[Row, float]:
    steps, repetitions = (case.quick_steps, 2) if quick else (case.steps, 5)
    pairs, predicted = [], []
    for number in range(repetitions):
        plain = loop.measure(steps)
        run = Path(f"{folder}-{number}")
        summary = swarm.train(case.job(steps), providers=case.providers, run=run, display=False).summary
        if summary.status != "finished":
            sys.exit(f"{case.title}: {summary.status}, {summary.reason}")
        ours = summary.samples_per_second
        pairs.append((plain, ours))
        predicted.append(summary.predicted_samples_per_second or 0.0)
        say(f"{case.title}: plain {plain:,.1f}, Ravnest {ours:,.1f} samples/s, ratio {ours / plain:.2f}")
    ratio = statistics.median(ours / plain for plain, ours in pairs)
    row = {
        "case": case.title,
        "plain_samples_per_second": statistics.median(plain for plain, _ in pairs),
        "ravnest_samples_per_second": statistics.median(ours for _, ours in pairs),
        "ratio": ratio,
        "predicted_samples_per_second": statistics.median(predicted),
    }
    return row, ratio


def _first_update(run: Path) -> float:
    """Seconds from the start of `ravnest train` in a fresh process to the first update of the demo."""
    command = [sys.executable, "-m", "ravnest", "train", "examples/digits/job.py", "--providers", "3"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    started = time.time()
    subprocess.run(
        [*command, "--run", str(run), "--set", "epochs=1", "--no-display"],
        cwd=ROOT,
        env=environment,
        check=True,
        stderr=subprocess.DEVNULL,
    )
    seconds = next(e["at"] for e in read_events(run / "events.jsonl") if e["kind"] == "first_update") - started
    say(f"first update of the demo after {seconds:.1f} s")
    return float(seconds)


if __name__ == "__main__":
    sys.exit(main())

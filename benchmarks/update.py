"""Update: time, bytes moved and temporary memory of one update of a stage, for several sizes and corrections.

A stage with two microbatches in flight is updated, so that every update is stale, keeps the version before, and
predicts weights if its correction does. On the same thread, in turn, torch's fused AdamW steps tensors of the same
shapes: the fastest plain update that torch has, in place, without a correction. Bytes are counted on a model of a cache
(update_parts/traffic.py); the least is one read of gradient, weights and moments, one write of weights and moments, and
one write of each further copy of the weights. Memory is the process's own peak during an update, above the larger of
its sizes before and after.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.models import GPT, GPT2, SMALL, GPTSize, next_token_loss
from benchmarks.report import Row, Target, arguments, finish, say
from benchmarks.update_parts.traffic import Traffic
from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.portable import PortableGraph
from ravnest.provider.machine.torch_footprint import give_memory_back
from ravnest.spec import OptimizerSpec

_AHEAD = 1
_MIN_UPDATES = 4
_MB = 1e6
_FLOAT = 4
_MAX_BYTES_RATIO = 1.4
_MAX_TEMPORARY = 0.05
"""Of the bytes of the parameters, beyond a few blocks."""
_FEW_BLOCKS = 32e6


@dataclass(frozen=True, slots=True)
class Case:
    correction: str
    clip_norm: float | None = None
    fused: bool = False

    def __str__(self) -> str:
        clipped = "" if self.clip_norm is None else ", clipped"
        return f"{self.correction}{clipped}{', fused' if self.fused else ''}"


def main() -> int:
    given = arguments("update", "Time, bytes moved and temporary memory of an update against the least there can be.")
    give_memory_back()
    torch.set_num_threads(1)
    seconds = 1.0 if given.quick else 6.0
    rows: list[Row] = []
    for millions, captured, graph in _models(given.quick):
        for case in _cases(given.quick):
            rows.append(_measure(f"{millions} M, {case}", captured, graph, case, seconds))
            row = rows[-1]
            say(f"{row['case']}: {row['ms']:.1f} ms, {row['bytes']:.1f} of {row['least_bytes']} bytes")
    large = [row for row in rows if float(str(row["parameters"])) > 5e6]
    moved = max(float(str(row["bytes"])) / float(str(row["least_bytes"])) for row in large)
    targets = [Target("bytes / least bytes, from 10 M on", moved, _MAX_BYTES_RATIO, at_most=True)]
    temporary = [
        max(0.0, float(str(row["temporary_mb"])) - _FEW_BLOCKS / _MB) / float(str(row["weights_mb"])) for row in large
    ]
    targets.append(Target("temporary memory beyond 32 MB / weights", max(temporary), _MAX_TEMPORARY, at_most=True))
    return finish("update", given, rows, targets)


def _models(quick: bool) -> Iterator[tuple[int, Captured, PortableGraph]]:
    sizes = {
        1: GPTSize(layers=4, width=128, heads=4, vocabulary=1024, context=64),
        10: SMALL,
        60: GPTSize(layers=3, width=GPT2.width, heads=GPT2.heads, vocabulary=GPT2.vocabulary, context=GPT2.context),
        124: GPT2,
    }
    for millions, size in sizes.items():
        if quick and millions > 10:
            return
        torch.manual_seed(0)
        # Few tokens: the gradients of a large model are wanted at the price of a small batch.
        tokens = torch.randint(size.vocabulary, (2, 2, 9))
        batches = [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]
        found = capture(GPT(size, tied=millions > 10), next_token_loss, {}, batches)
        yield millions, found, found.graph


def _cases(quick: bool) -> list[Case]:
    cases = [Case("none"), Case("cautious")]
    if not quick:
        cases += [Case("nesterov"), Case("none", fused=True), Case("none", 1.0), Case("cautious", 1.0)]
        cases += [Case("nesterov", 1.0)]
    return cases


class _Updated:
    """A stage that is updated again and again, with microbatches in flight."""

    def __init__(self, captured: Captured, graph: PortableGraph, case: Case) -> None:
        arguments_ = {"lr": 1e-4, **({"fused": True} if case.fused else {})}
        settings = StageSettings(
            optimizer=OptimizerSpec("AdamW", arguments_).to_json(), correction=case.correction, clip_norm=case.clip_norm
        )
        self.stage = Stage(graph, {spec.key: captured.weights[spec.key].clone() for spec in graph.weights}, settings)
        self._sample = captured.sample
        self._number = 0
        for _ in range(_AHEAD):
            self._forward()

    def prepare(self) -> None:
        """A forward and a backward, whose gradients the next update applies."""
        self._forward()
        self.stage.backward(self._number - 1 - _AHEAD, None)

    def update(self) -> None:
        """An update, and the weights for the next forward."""
        self.stage.update(self._number - 1 - _AHEAD)
        self.stage.correction.forward_weights()

    def _forward(self) -> None:
        self.stage.forward(self._number, {name: value.clone() for name, value in self._sample.items()})
        self._number += 1


def _measure(name: str, captured: Captured, graph: PortableGraph, case: Case, seconds: float) -> Row:
    ours = _Updated(captured, graph, case)
    count = sum(captured.weights[spec.key].numel() for spec in graph.parameters)
    # The first updates create the moments and measure the staleness.
    for _ in range(2):
        ours.prepare()
        ours.update()
    temporary = []
    for _ in range(2):
        ours.prepare()
        temporary.append(_temporary_bytes(ours.update))
    ours.prepare()
    with Traffic() as traffic:
        ours.update()
    peer = _fused_adamw([tuple(spec.shape) for spec in graph.parameters])
    times: dict[str, list[float]] = {"ours": [], "fused": []}
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(times["ours"]) < _MIN_UPDATES:
        ours.prepare()
        times["ours"].append(_timed(ours.update))
        times["fused"].append(_timed(peer))
    best = {who: min(found) for who, found in times.items()}
    # Gradient, weights and two moments are read; weights, moments, and the versions in further memory are written.
    predicts = case.correction == "cautious"
    return {
        "case": name,
        "parameters": count,
        "ms": 1e3 * best["ours"],
        "median_ms": 1e3 * statistics.median(times["ours"]),
        "fused_ms": 1e3 * best["fused"],
        "ratio": best["ours"] / best["fused"],
        "bytes": traffic.moved_bytes() / count,
        "least_bytes": 28 + _FLOAT * predicts + _FLOAT * (case.clip_norm is not None),
        "temporary_mb": min(temporary) / _MB,
        "weights_mb": _FLOAT * count / _MB,
    }


def _fused_adamw(shapes: list[tuple[int, ...]]) -> Callable[[], None]:
    parameters = [torch.nn.Parameter(torch.randn(shape).mul_(0.02)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).mul_(1e-3)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    optimizer.step()
    return lambda: optimizer.step() and None


def _timed(work: Callable[[], None]) -> float:
    """Processor seconds of this thread: other processes do not count."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def _temporary_bytes(work: Callable[[], None]) -> float:
    """Peak memory of the process during the work, above what it has before and after; 0 where it cannot be read."""
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        work()
        return 0.0
    before = _memory_bytes("VmRSS")
    # The kernel then begins a new peak.
    reset.write_text("5")
    work()
    peak = _memory_bytes("VmHWM")
    return max(0.0, peak - max(before, _memory_bytes("VmRSS")))


def _memory_bytes(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * float(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    sys.exit(main())

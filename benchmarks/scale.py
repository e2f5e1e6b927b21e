"""Scale: memory, speed and traffic of real models in 1 to 4 stages, next to one process of PyTorch and to 1F1B.

Each model is trained at its real size with microbatches of two samples, as `ravnest train` does it by default: every
provider on this machine, which divides its cores among them. The peers run in the same invocation: plain PyTorch with
two threads, before and after the runs whose rate is compared with it, and 1F1B of torch.distributed.pipelining over
gloo with the same model, cut at the modules in which Ravnest's stages begin.

- `of plain` is the rate relative to plain PyTorch, `of planned` relative to the plan's prediction.
- `peak` is the largest resident memory of each stage's process. `allowed` is 1.3 times the plain peak divided by the
  stages, and the activations in flight: what autograd keeps for each microbatch between forward and backward at the
  stage (one more than the largest staleness; one on a leaf), and the activations that cross its cuts, for as many
  microbatches as were in flight in the cluster.
- `requester` is the peak of `ravnest train` itself, which captures the model and feeds the data.
- `link ratio` is the bytes on a link relative to the activations and gradients that cross the cut, counted from the
  graph; the last may be the link from the leaf to the root, for looked-up rows. Of a weight that both sides use, the
  least result of one of its uses counts, not the weight.
- 1F1B makes 8 microbatches and one update a step; the step after the first is timed.

The rows "20/100" are two and three machines in the WAN lab, on lines of 20 Mbit/s with 100 ms of round trip, with a GPT
of 10 million parameters. They share two cores, so each pretends to be four times slower than it is.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Row, Target, arguments, finish, say
from benchmarks.scale_parts.bounds import (
    LARGEST_SHARES,
    StageFigures,
    allowed_bytes,
    in_flight_bytes,
    link_ratio,
    peer_cuts,
)
from benchmarks.scale_parts.ours import Run, plain_json, train
from benchmarks.scale_parts.peers import TorchFigures, graph_figures, one_f_one_b, plain
from benchmarks.scale_parts.tasks import LINE_TASKS, MODELS, TASKS
from benchmarks.scale_parts.wan import LINE, Lines
from ravnest.cores import usable_cores
from tests.wan import Lab

_MIB = 1 << 20
_THREADS = 2
_ONE_PROVIDER = 0.95
_TWO_STAGES = 0.9
_LINK_EXCESS = 1.1
_OF_PLANNED = 0.9
_WAN = "wan"
_QUICK = ("gpt2",)
_ALSO_ON_ONE_CORE = ("gpt2",)
_QUICK_STEPS = 10
_PEER_MICROBATCHES = 8
_PEER_STEPS = 1


def main() -> int:
    given = arguments("scale", "Memory, speed and traffic of real models in several stages.", [*MODELS, _WAN])
    chosen = given.only
    if given.quick and len(chosen) == len(MODELS) + 1:
        chosen = [*_QUICK, _WAN]
    rows: list[Row] = []
    targets: list[Target] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            if name == _WAN:
                continue
            model = _Measured.take(name, (1, 2) if given.quick else (1, 2, 3, 4), Path(folder), given.quick)
            rows += model.rows()
            targets += model.targets()
        if _WAN in chosen:
            found = _wan(Path(folder), given.quick)
            rows += found[0]
            targets += found[1]
    return finish("scale", given, rows, targets)


@dataclass(frozen=True, slots=True)
class _Measured:
    """All measurements of one model."""

    name: str
    plain: list[TorchFigures]
    plain_single: TorchFigures | None
    """One thread."""
    single: Run | None
    """One provider on one core."""
    runs: dict[int, Run]
    """By the number of stages."""
    graphs: dict[int, list[StageFigures]]
    peers: dict[int, TorchFigures]

    @classmethod
    def take(cls, name: str, counts: Sequence[int], folder: Path, quick: bool) -> "_Measured":
        task = TASKS[name]
        steps = min(task.steps, _QUICK_STEPS) if quick else task.steps
        plains: list[TorchFigures] = []
        runs = {}

        def measure_plain() -> None:
            plains.append(plain(name, _THREADS, steps))
            rate, peak = plains[-1].samples_per_second, plains[-1].peak_bytes[0]
            say(f"{task.title}: plain PyTorch, {_THREADS} threads: {rate:.3g} samples/s, {peak / _MIB:,.0f} MiB")

        measure_plain()
        for count in counts:
            runs[count] = train(name, steps, count, folder / f"{name}-{count}")
            say(_said(task.title, count, runs[count]))
            if count <= 2:
                measure_plain()
        plain_single, single = None, None
        if name in _ALSO_ON_ONE_CORE and not quick:
            plain_single = plain(name, 1, steps // 2)
            single = train(name, steps // 2, 1, folder / f"{name}-single", cores=1)
            say(f"{_said(task.title, 1, single)}, on one core")
        several = [count for count in counts if count > 1]
        graphs = dict(zip(several, graph_figures(name, [runs[count].places for count in several]), strict=True))
        owns = [piece.owns for piece in task.pieces(task.build())]
        peers = {}
        for count in several:
            cuts = peer_cuts([stage.begins for stage in graphs[count][1:]], owns)
            peers[count] = one_f_one_b(name, cuts, _PEER_MICROBATCHES, _PEER_STEPS, max(1, usable_cores() // count))
            say(f"{task.title}: 1F1B, {count} stages: {peers[count].samples_per_second:.3g} samples/s")
        return cls(name, plains, plain_single, single, runs, graphs, peers)

    def rows(self) -> list[Row]:
        title = TASKS[self.name].title
        rows = [_torch_row(f"{title}: plain, {_THREADS} threads", self._plain_figures(), self._rate())]
        for count, run in self.runs.items():
            rows.append(self._row(f"{title}: {_providers(count)}", count, run))
            if count in self.peers:
                rows.append(_torch_row(f"{title}: 1F1B, {count} stages", self.peers[count], self._rate()))
        if self.plain_single is not None and self.single is not None:
            alone = self.plain_single.samples_per_second
            rows.append(_torch_row(f"{title}: plain, 1 thread", self.plain_single, alone))
            rows.append(
                {**self._row(f"{title}: 1 provider on 1 core", 1, self.single), "of_plain": _of(self.single, alone)}
            )
        return rows

    def targets(self) -> list[Target]:
        title = TASKS[self.name].title
        found = []
        for count, run in self.runs.items():
            where = f"{title}, {_providers(count)}"
            if count == 1:
                found.append(Target(f"{where}: of plain", self._of_near(0, run), _ONE_PROVIDER))
                continue
            if count == 2:
                found.append(Target(f"{where} of one thread: of plain with two", self._of_near(1, run), _TWO_STAGES))
            peaks = [stage.peak_memory_bytes for stage in run.stages]
            worst = max(peak / allowed for peak, allowed in zip(peaks, self._allowed(count), strict=True))
            largest = max(peaks) / self._plain_figures().peak_bytes[0]
            found.append(Target(f"{where}: peak of allowed, worst stage", worst, 1.0, at_most=True))
            found.append(Target(f"{where}: largest peak of plain", largest, LARGEST_SHARES[count], at_most=True))
            found.append(Target(f"{where}: bytes on links", max(self._links(count)), _LINK_EXCESS, at_most=True))
        return found

    def _row(self, case: str, count: int, run: Run) -> Row:
        own: dict[str, object] = {
            "case": case,
            "samples_per_second": run.samples_per_second,
            "of_plain": self._of_near(count - 1, run) if count <= 2 else _of(run, self._rate()),
            "of_planned": run.samples_per_second / run.planned_samples_per_second,
            "parameters_m": _list([stage.parameters / 1e6 for stage in run.stages], "{:.1f}"),
            "peak_mib": _list([stage.peak_memory_bytes / _MIB for stage in run.stages], "{:.0f}"),
        }
        if count > 1:
            own |= {
                "allowed_mib": _list([each / _MIB for each in self._allowed(count)], "{:.0f}"),
                "busy": _list([stage.busy_fraction for stage in run.stages], "{:.2f}"),
                "link_ratio": _list(self._links(count), "{:.3g}"),
            }
        own["requester_mib"] = round(run.requester_peak_bytes / _MIB)
        return own | plain_json(run)

    def _plain_figures(self) -> TorchFigures:
        return self.plain[0]

    def _rate(self) -> float:
        return statistics.median(each.samples_per_second for each in self.plain)

    def _of_near(self, number: int, run: Run) -> float:
        """The rate relative to the mean of plain before and after this run."""
        near = self.plain[number : number + 2]
        return _of(run, statistics.fmean(each.samples_per_second for each in near))

    def _allowed(self, count: int) -> list[float]:
        run, peak = self.runs[count], self._plain_figures().peak_bytes[0]
        flights = zip(self.graphs[count], run.flying, strict=True)
        return [allowed_bytes(peak, count, in_flight_bytes(stage, flying, run.limit)) for stage, flying in flights]

    def _links(self, count: int) -> list[float]:
        return [link_ratio(use, stage) for use, stage in zip(self.runs[count].links, self.graphs[count], strict=False)]


def _wan(folder: Path, quick: bool) -> tuple[list[Row], list[Target]]:
    """Runs on slow lines."""
    if reason := Lab.unavailable():
        say(f"the WAN lab is not available, its rows are left out: {reason}")
        return [], []
    rows: list[Row] = []
    targets: list[Target] = []
    for name in LINE_TASKS:
        for count in (2,) if quick else (2, 3):
            with Lines(count) as lines:
                run = lines.train(name, TASKS[name].steps, folder / f"wan-{name}-{count}")
            [stages] = graph_figures(name, [run.places])
            case = f"{TASKS[name].title}, {LINE.name}: {_providers(count)}"
            say(_said(f"{TASKS[name].title}, {LINE.name}", count, run))
            ratios = [link_ratio(use, stage) for use, stage in zip(run.links, stages, strict=False)]
            of_planned = run.samples_per_second / run.planned_samples_per_second
            rows.append(
                {
                    "case": case,
                    "samples_per_second": run.samples_per_second,
                    "of_planned": of_planned,
                    "parameters_m": _list([stage.parameters / 1e6 for stage in run.stages], "{:.1f}"),
                    "peak_mib": _list([stage.peak_memory_bytes / _MIB for stage in run.stages], "{:.0f}"),
                    "busy": _list([stage.busy_fraction for stage in run.stages], "{:.2f}"),
                    "link_ratio": _list(ratios, "{:.3g}"),
                    **plain_json(run),
                }
            )
            targets.append(Target(f"{case}: of planned", of_planned, _OF_PLANNED))
            targets.append(Target(f"{case}: bytes on links", max(ratios), _LINK_EXCESS, at_most=True))
    return rows, targets


def _torch_row(case: str, figures: TorchFigures, plain_rate: float) -> Row:
    return {
        "case": case,
        "samples_per_second": figures.samples_per_second,
        "of_plain": figures.samples_per_second / plain_rate,
        "parameters_m": _list([count / 1e6 for count in figures.parameters], "{:.1f}"),
        "peak_mib": _list([peak / _MIB for peak in figures.peak_bytes], "{:.0f}"),
    }


def _of(run: Run, rate: float) -> float:
    return run.samples_per_second / rate


def _said(title: str, count: int, run: Run) -> str:
    peaks = _list([stage.peak_memory_bytes / _MIB for stage in run.stages], "{:,.0f}")
    planned = run.planned_samples_per_second
    return f"{title}: {_providers(count)}: {run.samples_per_second:.3g} samples/s ({planned:.3g} planned), {peaks} MiB"


def _providers(count: int) -> str:
    return f"{count} stages" if count > 1 else "1 provider"


def _list(values: Sequence[float], form: str) -> str:
    """Figures of all stages or links in one cell of the table."""
    return " / ".join(form.format(value) for value in values)


if __name__ == "__main__":
    sys.exit(main())

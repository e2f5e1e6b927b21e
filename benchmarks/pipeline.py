"""Pipeline: whether pipelines over real lines are ever idle, against GPipe and 1F1B of torch.distributed.pipelining.

All contenders train the same model, cut at the same places, with the same microbatches in the WAN lab: each stage on a
host of its own, lines of various rates and delays between any two hosts, and the coordinator near all of them. This
machine has too few cores for all stages, so stages are paced: for every contender a forward takes 50 ms and a backward
100 ms, most of it waiting, and 1 MiB of float32 crosses between two stages in each direction. GPipe and 1F1B run over
gloo with 8 microbatches per step, including their optimizer steps; the fastest of a few steps counts. Ravnest's rate is
measured between the first seconds and the end of the data, over TLS, once with float32 on the links and once with its
own choice of codec. On slow lines Ravnest compresses float32 without loss; `kb` is the size that was really sent.

`of limit` is relative to the rate without idle stages, idle lines and headers: 6.67 microbatches per second, or the
line's rate divided by the bytes of a microbatch. Compressed float32 may be above 1, because the limit is that of a full
MiB. `of tcp` is for cells in which the line is the limit: the bytes sent, relative to bare TCP connections, one over
each line of the pipeline, all full in both directions in the same lab; the slowest direction of the slowest line
counts. Another target is the line's rate minus headers, without congestion control and acknowledgements. Such cells are
measured for 40 s, after 20 s or ten times the way of a microbatch, in which the number in flight settles. `busy` is the
busy share of the slowest stage, `flight` the number of microbatches in flight, `stale` the largest staleness, `auto`
the run with the codec that Ravnest chose, and `idle` the idle share of the machine's processor: if it is small, the
measurement includes waiting for the processor. Rows of "real" compute without a pace: a GPT of 10 million parameters on
2 stages. There the mean of all steps but the first counts, and Ravnest's run with float32 makes one update per 8
microbatches like the others; `auto` makes one per microbatch, as always.

With `--slow-motion N` everything runs N times slower for every contender: the pace, the rates of lines and their
delays. The reported figures are scaled back. The machine's cores then have N times as long for a microbatch. Timers of
TCP itself are not scaled, such as the pause of BBR for 0.2 s or a round trip every ten seconds.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.pipeline_parts.cells import ALL, PACE, PAYLOAD_SHARE, QUICK, USUAL, Cell, chosen
from benchmarks.pipeline_parts.models import CROSSING_BYTES, TASKS, cut_blocks
from benchmarks.pipeline_parts.swarms import (
    MICROBATCHES,
    BareLines,
    RavnestRate,
    RavnestSwarm,
    RunFailedError,
    TorchPipelines,
    TorchRate,
)
from benchmarks.report import Row, Target, finish, say
from ravnest.engine.speed.pretended_pace import StageSeconds
from tests.wan import Host, Lab

_LIMIT_TARGET = 0.95
_BUSY_TARGET = 0.95
_EQUAL_BYTES_TARGET = 3.0
_DEFAULT_TARGET = 8.0
_QUICK_SECONDS = 5.0
_SETTLING_SECONDS = 20.0
_SETTLING_WAYS = 10
"""Warm-up in round trips, if the line is the limit: each decision about the number in flight takes several."""
_SLOW_SECONDS = 40.0
"""Duration of a measurement if the line is the limit. BBR pauses about every ten seconds, so a shorter measurement
would include one pause or none."""
_BARE_SECONDS = 20.0
_REAL_SECONDS = 20.0
"""Duration of a measurement with real compute: enough for several microbatches."""
_REAL_STEPS = 8
"""Steps of the other contenders, which take about the same time."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates of all contenders in one cell."""

    cell: Cell
    gpipe: TorchRate
    one_f_one_b: TorchRate
    equal: RavnestRate
    """Ravnest with float32 on the links."""
    default: RavnestRate
    idle: float
    """Idle share of the processor during the measurement. Without idle time, waiting for the processor is measured."""
    tcp_bytes: float | None
    """Bytes per second that bare TCP carries over the line, if the line is the limit."""


def main() -> int:
    given = _arguments()
    if reason := Lab.unavailable():
        say(f"the WAN lab is not available: {reason}")
        return 2
    try:
        usual = QUICK if given.quick else ALL if given.all else USUAL
        cells = chosen(given.only, ALL) if given.only else list(usual)
    except ValueError as error:
        say(f"--only: {error}")
        return 2
    if given.slow_motion != 1.0:
        cells = [cell for cell in cells if cell.paced]
        say(f"runs {given.slow_motion:g} times slower and reports scaled figures; without rows of real compute")
    found: list[Measured] = []
    for paced in (True, False):
        group = [cell for cell in cells if cell.paced == paced]
        if group:
            found += _measured(group, paced, given)
    targets = [Target("cells in which a run failed", float(len(cells) - len(found)), 0.0, at_most=True)]
    targets += _targets([each for each in found if each.cell.paced])
    return finish("pipeline", given, [_row(each) for each in found], targets)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline", description="Whether pipelines are ever idle."
    )
    parser.add_argument("--quick", action="store_true", help="one cell, within a minute")
    parser.add_argument("--all", action="store_true", help="also the CNN with every number of stages: 50 minutes")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the result to this file")
    parser.add_argument("--record", action="store_true", help="also write the table to benchmarks/history/")
    parser.add_argument(
        "--only",
        metavar="CELL",
        action="append",
        help="run only these cells, such as gpt,4,100/50 or 8; may be repeated",
    )
    parser.add_argument(
        "--in-flight",
        metavar="N",
        help="microbatches in flight; `needed`: computed from rates and delays (default: Ravnest's choice)",
    )
    parser.add_argument("--codec", help="codec of Ravnest's second run in each cell (default: Ravnest's choice)")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each measurement of Ravnest")
    parser.add_argument(
        "--slow-motion",
        metavar="N",
        type=float,
        default=1.0,
        help="run everything N times slower, for machines with few cores",
    )
    given = parser.parse_args()
    if not 1 <= given.slow_motion <= 10:
        parser.error(f"--slow-motion must be from 1 to 10, not {given.slow_motion:g}")
    return given


def _measured(cells: Sequence[Cell], paced: bool, given: argparse.Namespace) -> list[Measured]:
    """All cells in one lab, in which every process stays from the first cell to the last."""
    hosts = [f"p{number}" for number in range(max(cell.stages for cell in cells))]
    slow: float = given.slow_motion
    found = []
    with Lab([Host("home"), *map(Host, hosts)]) as lab, ExitStack() as stack:
        if not lab.status()["real_time"]:
            say("the lab's switch has no real-time priority here: lines are less exact")
        ours = stack.enter_context(RavnestSwarm(lab, hosts, _pace(slow) if paced else None))
        theirs = stack.enter_context(TorchPipelines(lab, hosts, [cell.stages for cell in cells]))
        bare: dict[tuple[str, int], float] = {}
        for number, cell in enumerate(cells):
            _set_lines(lab, hosts, cell, slow)
            say(f"cell {number + 1} of {len(cells)}, {time.strftime('%H:%M:%S')}")
            lines = cell.line.name, cell.stages
            if not cell.computes and lines not in bare:
                with BareLines(lab, hosts[: cell.stages], _BARE_SECONDS * slow) as each:
                    bare[lines] = each.bytes_per_second() * slow
                mbps = bare[lines] * 8e-6
                say(f"{cell.line.name}: bare TCP, both ways at once, slowest of {cell.stages - 1}: {mbps:.2f} Mbit/s")
            try:
                found.append(_cell(cell, ours, theirs, given, bare.get(lines)))
            except RunFailedError as error:
                say(f"{cell.name} is left out: {error}")
        if late := ours.overruns():
            say(f"{late} of Ravnest's forwards and backwards took longer than the pace: the machine was too busy")
    return found


def _cell(
    cell: Cell, ours: RavnestSwarm, theirs: TorchPipelines, given: argparse.Namespace, tcp_bytes: float | None
) -> Measured:
    """The contenders take turns, so that a busy machine slows both."""
    steps = 2 if given.quick or (cell.line.mbps is not None and cell.line.mbps <= 100) else 3
    if not cell.paced:
        steps = _REAL_STEPS
    slow: float = given.slow_motion
    pace = _pace(slow) if cell.paced else None
    psutil.cpu_times_percent()
    torch = []
    ravnest = []
    for schedule, codec in (("GPipe", "float32"), ("1F1B", given.codec)):
        rate = theirs.rate(cell.task, cell.stages, schedule, steps, pace)
        torch.append(replace(rate, microbatches_per_second=rate.microbatches_per_second * slow))
        _say_torch(cell, schedule, torch[-1])
        ravnest.append(_ravnest(cell, ours, codec, given))
    idle = psutil.cpu_times_percent().idle / 100
    return Measured(cell, torch[0], torch[1], ravnest[0], ravnest[1], idle, tcp_bytes)


def _ravnest(cell: Cell, ours: RavnestSwarm, codec: str | None, given: argparse.Namespace) -> RavnestRate:
    in_flight = given.in_flight
    if in_flight is not None:
        in_flight = cell.needed_in_flight() if in_flight == "needed" else int(in_flight)
    pipeline: dict[str, Any] = {"in_flight": in_flight, "codec": codec}
    if not cell.paced and codec == "float32":
        pipeline["accumulate"] = MICROBATCHES
    warm_seconds = (2.0 if given.quick else 3.0) + 2 * cell.round_trip_seconds()
    seconds = max(given.seconds, 35 * cell.period_seconds() if cell.paced else _REAL_SECONDS)
    if not cell.computes:
        warm_seconds = max(_SETTLING_SECONDS, _SETTLING_WAYS * cell.round_trip_seconds())
        seconds = max(seconds, _SLOW_SECONDS)
    if given.quick:
        seconds = _QUICK_SECONDS
    slow: float = given.slow_motion
    try:
        rate = ours.rate(cell.task, cell.stages, warm_seconds * slow, seconds * slow, pipeline)
    except RunFailedError as error:
        say(f"{cell.name}: a run failed and is repeated: {error}")
        rate = ours.rate(cell.task, cell.stages, warm_seconds * slow, seconds * slow, pipeline)
    rate = replace(rate, microbatches_per_second=rate.microbatches_per_second * slow, predicted=rate.predicted * slow)
    _check_cuts(cell, rate)
    say(
        f"{cell.name}: Ravnest, {codec or 'its own codec'}: {rate.microbatches_per_second:.2f} microbatches/s, "
        f"{rate.in_flight} in flight, staleness up to {rate.staleness_max}, busy {_numbers(rate.busy)}, "
        f"{rate.bytes_per_microbatch / 1e6:.2f} MB a microbatch"
    )
    return rate


def _say_torch(cell: Cell, schedule: str, rate: TorchRate) -> None:
    late = f", {rate.overruns} forwards and backwards took longer than the pace" if rate.overruns else ""
    say(f"{cell.name}: {schedule}: {rate.microbatches_per_second:.2f} microbatches/s{late}")


def _check_cuts(cell: Cell, rate: RavnestRate) -> None:
    """The comparison is valid for equal cuts only."""
    wanted = [f"blocks.{block}." for block in cut_blocks(cell.stages, TASKS[cell.task].blocks)]
    same = len(wanted) == len(rate.begins) and all(
        begin.startswith(name) for begin, name in zip(rate.begins, wanted, strict=True)
    )
    assert same, f"{cell.name}: stages begin with {rate.begins}, and not with {wanted}"


def _pace(slow: float) -> StageSeconds:
    return StageSeconds(PACE.forward * slow, PACE.backward * slow)


def _set_lines(lab: Lab, hosts: Sequence[str], cell: Cell, slow: float) -> None:
    rate_mbps = None if cell.line.mbps is None else cell.line.mbps / slow
    for number, one in enumerate(hosts):
        for other in hosts[number + 1 :]:
            lab.pair(one, other).set(delay_ms=cell.line.round_trip_ms / 2 * slow, rate_mbps=rate_mbps)


def _row(measured: Measured) -> Row:
    cell, equal, default = measured.cell, measured.equal, measured.default
    gpipe, one_f_one_b = measured.gpipe.microbatches_per_second, measured.one_f_one_b.microbatches_per_second
    return {
        "case": cell.name,
        "limit": cell.limit() if cell.paced else None,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "float32": equal.microbatches_per_second,
        "of_limit": _of_limit(cell, equal, CROSSING_BYTES) if cell.paced else None,
        "kb": round(equal.bytes_per_microbatch / 1e3),
        "of_tcp": None if measured.tcp_bytes is None else _of_tcp(equal, measured.tcp_bytes),
        "x_gpipe": equal.microbatches_per_second / gpipe,
        "x_1f1b": equal.microbatches_per_second / one_f_one_b,
        "busy": max(equal.busy, default=0.0),
        "flight": equal.in_flight,
        "stale": equal.staleness_max,
        "auto": default.microbatches_per_second,
        "auto_of_limit": _of_limit(cell, default, default.bytes_per_microbatch) if cell.paced else None,
        "auto_x_1f1b": default.microbatches_per_second / one_f_one_b,
        "auto_kb": round(default.bytes_per_microbatch / 1e3),
        "auto_flight": default.in_flight,
        "auto_stale": default.staleness_max,
        "idle": measured.idle,
    }


def _of_limit(cell: Cell, rate: RavnestRate, crossing_bytes: float) -> float:
    return rate.microbatches_per_second / cell.limit(crossing_bytes)


def _of_tcp(rate: RavnestRate, tcp_bytes: float) -> float:
    return rate.microbatches_per_second * rate.bytes_per_microbatch / tcp_bytes


def _targets(found: Sequence[Measured]) -> list[Target]:
    if not found:
        return []
    equal = {m.cell.name: _of_limit(m.cell, m.equal, CROSSING_BYTES) for m in found}
    default = {m.cell.name: _of_limit(m.cell, m.default, m.default.bytes_per_microbatch) for m in found}
    busy = {m.cell.name: max(m.equal.busy, default=0.0) for m in found if m.cell.computes}
    tcp = {m.cell.name: _of_tcp(m.equal, m.tcp_bytes) for m in found if m.tcp_bytes is not None}
    line = {
        m.cell.name: _of_tcp(m.equal, PAYLOAD_SHARE * m.cell.line.mbps * 125_000)
        for m in found
        if m.tcp_bytes is not None and m.cell.line.mbps is not None
    }
    targets = [
        _least("float32, of the limit", equal, _LIMIT_TARGET),
        _least("default codec, of the limit", default, _LIMIT_TARGET),
    ]
    if tcp:
        targets.append(_least("float32, of what bare TCP carries, where the line is the limit", tcp, _LIMIT_TARGET))
        targets.append(_least("float32, of the line but for headers, where it is the limit", line, _LIMIT_TARGET))
    if busy:
        targets.append(_least("busy share of the slowest stage, where stages are the limit", busy, _BUSY_TARGET))
    for each in found:
        cell, rate = each.cell, each.equal.microbatches_per_second
        gpipe, one_f_one_b = each.gpipe.microbatches_per_second, each.one_f_one_b.microbatches_per_second
        if cell.stages == 4 and cell.line.name == "100/50":
            targets.append(Target(f"{cell.name}: float32, times GPipe", rate / gpipe, _EQUAL_BYTES_TARGET))
            targets.append(Target(f"{cell.name}: float32, times 1F1B", rate / one_f_one_b, _EQUAL_BYTES_TARGET))
        if cell.stages == 4 and cell.line.name == "20/100":
            ratio = each.default.microbatches_per_second / one_f_one_b
            targets.append(Target(f"{cell.name}: default codec, times 1F1B", ratio, _DEFAULT_TARGET))
    return targets


def _least(what: str, values: dict[str, float], target: float) -> Target:
    """A target for all cells, with the name of the worst one."""
    worst = min(values, key=lambda name: values[name])
    return Target(f"{what}, in every cell (least in {worst})", values[worst], target)


def _numbers(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


if __name__ == "__main__":
    sys.exit(main())

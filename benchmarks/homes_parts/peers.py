"""Peers on the machines and lines of a case: hivemind's `Optimizer`, and averaging as in DiLoCo over gloo.

gloo cannot connect two machines that are both behind NAT, and hivemind needs relays for it. Both get the lines of the
case without NAT, as if every router forwarded their ports.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.homes_parts.cases import Case
from benchmarks.homes_parts.models import MODELS
from benchmarks.homes_parts.peer_member import Place, steps_path
from benchmarks.homes_parts.population import Population
from benchmarks.homes_parts.swarm import lab_of, slower
from benchmarks.report import ROOT

_PARTS: Final = "benchmarks.homes_parts"
_INNER_STEPS: Final = 100
_START_SECONDS: Final = 120.0
_AVERAGING_SECONDS: Final = 1200.0
"""Timeout for the first averaging beyond the measured time."""
_LOOK_SECONDS: Final = 0.5

Step = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Curve:
    """Training of one contender."""

    samples_per_second: float
    averagings: int
    points: tuple[tuple[float, float], ...]
    """Seconds since the first step, and the loss of a microbatch before its update, of all members in order of time."""


def run_peer(case: Case, module: str, interpreter: str, folder: Path) -> Curve:
    """One peer for the measured time of the case, and until it has averaged once. RuntimeError: a member ended;
    TimeoutError: no member trained, or averaged."""
    population = without_nat(case.population)
    folder.mkdir(parents=True, exist_ok=True)
    homes = population.homes
    with lab_of(population) as lab:
        members = []
        for index, home in enumerate(homes):
            place = Place(
                index=index,
                count=len(homes),
                host=lab.host(home.name).address,
                folder=str(folder),
                model=case.model,
                slower=slower(len(homes), os.cpu_count() or 1),
                inner_steps=_INNER_STEPS,
                averaging_seconds=2 * averaging_seconds(population, MODELS[case.model].parameters),
            )
            with open(folder / f"{home.name}.txt", "wb") as said:
                members.append(
                    lab.host(home.name).popen(
                        [interpreter, "-m", f"{_PARTS}.{module}", place.text()],
                        cwd=ROOT,
                        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                        stdin=subprocess.DEVNULL,
                        stdout=said,
                        stderr=said,
                    )
                )
        names = [home.name for home in homes]
        _wait(folder, names, members, lambda steps: all(steps), _START_SECONDS, "step of every member")
        time.sleep(case.settle_seconds + case.measure_seconds)
        # The rate counts whole rounds, so at least one has to be complete.
        _wait(folder, names, members, _have_averaged, _AVERAGING_SECONDS, "averaging")
        return curve(read_steps(folder, len(homes)))


def without_nat(population: Population) -> Population:
    return replace(population, homes=tuple(replace(home, nat=False) for home in population.homes))


def averaging_seconds(population: Population, parameters: int) -> float:
    """Seconds of one averaging of float32 over the slowest line."""
    slowest = min(min(home.up_mbps, home.down_mbps) for home in population.homes)
    return max(30.0, 2 * parameters * 4 * 8e-6 / slowest)


def read_steps(folder: Path, count: int) -> list[list[Step]]:
    """The steps of each member so far."""
    found = []
    for index in range(count):
        path = steps_path(folder, index)
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found.append([json.loads(line) for line in lines if line.endswith("\n")])
    return found


def curve(members: Sequence[Sequence[Step]]) -> Curve:
    """Rate and losses of all members together. The rate of a member counts whole rounds: from its first step to the end
    of its last averaging, or to its last step if it never averaged."""
    began = min(steps[0]["at"] for steps in members)
    rate = 0.0
    for steps in members:
        ends = [index for index in range(1, len(steps)) if steps[index]["averaged"] > steps[index - 1]["averaged"]]
        last = ends[-1] if ends else len(steps) - 1
        seconds = steps[last]["at"] - steps[0]["at"]
        if seconds > 0:
            rate += sum(step["samples"] for step in steps[1 : last + 1]) / seconds
    points = sorted((step["at"] - began, step["loss"]) for steps in members for step in steps)
    return Curve(rate, min(steps[-1]["averaged"] - steps[0]["averaged"] for steps in members), tuple(points))


def smoothed(points: Sequence[tuple[float, float]], over: int = 50) -> list[tuple[float, float]]:
    """The mean loss of this many microbatches up to each point."""
    found, total = [], 0.0
    for index, (at, loss) in enumerate(points):
        total += loss - (points[index - over][1] if index >= over else 0.0)
        if index >= over - 1:
            found.append((at, total / over))
    return found


def seconds_to(points: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Seconds until the smoothed loss was this low; None if it never was."""
    return next((at for at, mean in smoothed(points) if mean <= loss), None)


def common_loss(curves: Sequence[Sequence[tuple[float, float]]]) -> float:
    """The lowest smoothed loss that every contender has reached; each has enough microbatches for one."""
    return max(min(mean for _, mean in smoothed(points)) for points in curves)


def missing_hivemind(interpreter: str | None) -> str:
    """Why hivemind cannot run with this interpreter; empty if it can."""
    if interpreter is None:
        return "no interpreter that has it: give one with --hivemind"
    try:
        asked = subprocess.run([interpreter, "-c", "import hivemind"], capture_output=True, text=True)
    except OSError as error:
        return str(error)
    return "" if asked.returncode == 0 else (asked.stderr.strip().splitlines() or ["it cannot be imported"])[-1]


def interpreters(hivemind: str | None) -> dict[str, tuple[str, str]]:
    """The module and the interpreter of each peer that can run here."""
    found = {"DiLoCo over gloo": ("gloo_member", sys.executable)}
    if hivemind is not None:
        found["hivemind"] = ("hivemind_member", hivemind)
    return found


def _have_averaged(members: Sequence[Sequence[Step]]) -> bool:
    return all(steps[-1]["averaged"] > steps[0]["averaged"] for steps in members)


def _wait(folder: Path, names: Sequence[str], members: Sequence[Any], until: Any, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not until(read_steps(folder, len(names))):
        for name, member in zip(names, members, strict=True):
            if member.poll() is not None:
                said = (folder / f"{name}.txt").read_text(errors="replace").strip().splitlines()
                raise RuntimeError(f"{name} ended with exit code {member.returncode}: {' '.join(said[-2:])}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {seconds:.0f} s")
        time.sleep(_LOOK_SECONDS)

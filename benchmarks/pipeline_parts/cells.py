"""Cells of benchmarks.pipeline: model, number of stages, lines, and the maximum possible rate."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.pipeline_parts.models import CROSSING_BYTES
from ravnest.engine.speed.pretended_pace import StageSeconds

PACE = StageSeconds(0.05, 0.1)
STAGES = (2, 3, 4, 8)
PACED_TASKS = ("gpt", "cnn")
REAL_TASK = "real"


@dataclass(frozen=True, slots=True)
class Line:
    """Line between every two hosts, in each direction; without a rate, as fast as this machine."""

    name: str
    mbps: float | None
    round_trip_ms: float

    def crossing_seconds(self, size_bytes: float) -> float:
        """Seconds that the line needs for this many bytes, without other traffic."""
        return 0.0 if self.mbps is None else size_bytes * 8e-6 / self.mbps


PAYLOAD_SHARE = 0.965
"""Share of a line's rate without the headers of TCP and IP (docs/wan-lab.md). If both directions are full, the
acknowledgements take another 0.02."""

LINES = (Line("unshaped", None, 0.0), Line("500/10", 500, 10), Line("100/50", 100, 50), Line("20/100", 20, 100))


@dataclass(frozen=True, slots=True)
class Cell:
    task: str
    stages: int
    line: Line

    @property
    def name(self) -> str:
        return f"{self.task} {self.stages} {self.line.name}"

    @property
    def paced(self) -> bool:
        return self.task != REAL_TASK

    @property
    def computes(self) -> bool:
        """Whether the stages, rather than the lines, are the limit with float32."""
        return self.line.crossing_seconds(CROSSING_BYTES) < _STAGE_SECONDS

    def period_seconds(self, crossing_bytes: float = CROSSING_BYTES) -> float:
        """Seconds between two microbatches if neither stages nor lines are ever idle."""
        return max(_STAGE_SECONDS, self.line.crossing_seconds(crossing_bytes))

    def limit(self, crossing_bytes: float = CROSSING_BYTES) -> float:
        """Maximum number of microbatches per second, with this many bytes per microbatch and direction on each link."""
        return 1 / self.period_seconds(crossing_bytes)

    def round_trip_seconds(self, crossing_bytes: float = CROSSING_BYTES) -> float:
        """Seconds of a single microbatch through all stages and back, without others in flight."""
        between = 2 * self.line.crossing_seconds(crossing_bytes) + self.line.round_trip_ms / 1e3
        return self.stages * _STAGE_SECONDS + (self.stages - 1) * between

    def needed_in_flight(self, crossing_bytes: float = CROSSING_BYTES) -> int:
        """The number in flight that covers the round trip, plus two."""
        return math.ceil(self.round_trip_seconds(crossing_bytes) / self.period_seconds(crossing_bytes)) + 2


_STAGE_SECONDS = PACE.forward + PACE.backward

QUICK = (Cell("gpt", 2, LINES[2]),)
USUAL = (
    *(Cell("gpt", stages, line) for stages in STAGES for line in LINES),
    *(Cell("cnn", 4, line) for line in LINES),
    *(Cell(REAL_TASK, 2, line) for line in LINES[::2]),
)
"""The default cells, which take half an hour; ALL takes nearly twice as long."""
ALL = (
    *(Cell(task, stages, line) for task in PACED_TASKS for stages in STAGES for line in LINES),
    *(Cell(REAL_TASK, 2, line) for line in LINES),
)


def chosen(only: Sequence[str], cells: Iterable[Cell] = ALL) -> list[Cell]:
    """The cells that match one of the selections, such as "gpt,4,100/50" or "8"; all cells without a selection.

    ValueError for a word that is not a task, a number of stages or a line.
    """
    found = list(cells)
    if not only:
        return found
    wanted: set[Cell] = set()
    for selection in only:
        fitting = found
        for word in (each.strip() for each in selection.split(",")):
            fitting = [cell for cell in fitting if word in _words(cell)]
            if not any(word in _words(cell) for cell in found):
                known = sorted({each for cell in found for each in _words(cell)})
                raise ValueError(f"{word!r} is in no cell; words are {', '.join(known)}")
        wanted.update(fitting)
    return [cell for cell in found if cell in wanted]


def _words(cell: Cell) -> tuple[str, ...]:
    return cell.task, str(cell.stages), cell.line.name

"""Text diagram of a cluster: a box for each stage, and between two boxes the bandwidth and latency of their link.

It uses characters of one cell each, so that it looks the same on a terminal, in a file and in an email.
"""

import math
from typing import Final

from rich.cells import cell_len, set_cell_size

from ravnest import units
from ravnest.planner.cluster import Cluster
from ravnest.planner.plan import role_of
from ravnest.planner.problem import Line
from ravnest.preview.dry_run import DryRun

MAX_BOXES: Final = 24
"""Maximum number of boxes of one cluster. A longer cluster is shown with its first and last stages only."""

_MIN_INSIDE: Final = 14
_MAX_INSIDE: Final = 24
_LINK: Final = 12

_ROWS: Final = 5

PLAIN: Final = str.maketrans("┌┐└┘│─▶◀…·", "++++|-><~-")
"""ASCII replacements, for an output without these characters."""


def picture(dry: DryRun, number: int, width: int) -> str:
    """One cluster of the plan, from its root to its leaf, in lines of up to `width` cells."""
    cluster = dry.clusters[number]
    numbers = list(range(len(cluster.stages)))
    left_out = len(numbers) - MAX_BOXES
    if left_out > 1:
        numbers = [*numbers[: MAX_BOXES - 4], *numbers[-4:]]
    inside = _inside(dry, number, numbers, width)
    pieces: list[list[str]] = []
    for place, k in enumerate(numbers):
        if place:
            gap = k - numbers[place - 1] - 1
            pieces.append(["", "", f"… {gap} more …"[:_LINK], "", ""] if gap else _link(dry, cluster, k))
        pieces.append(_box(_texts(dry, number, k), inside))
    return "\n".join(line for row in _rows(pieces, width) for line in row)


def rate(bytes_per_second: float) -> str:
    """The bandwidth of a line: "40 Mbit/s", "2.5 Gbit/s" or "no limit"."""
    if not math.isfinite(bytes_per_second):
        return "no limit"
    if bytes_per_second * 8 >= 999.5e6:
        return f"{bytes_per_second * 8 / 1e9:.3g} Gbit/s"
    return f"{units.megabits(bytes_per_second)} Mbit/s"


def _inside(dry: DryRun, number: int, numbers: list[int], width: int) -> int:
    """Inner width of the boxes: enough for the longest text, within bounds, so that at least one box fits."""
    texts = [cell_len(text) for k in numbers for text in _texts(dry, number, k)]
    return max(4, min(max(_MIN_INSIDE, *texts), _MAX_INSIDE, width - _LINK - 4))


def _texts(dry: DryRun, number: int, k: int) -> tuple[str, str, str]:
    cluster = dry.clusters[number]
    stage = cluster.stages[k]
    part = dry.parts.between(stage.start, stage.end)
    busy = round(100 * stage.compute_seconds * dry.plan.rates[number] / cluster.samples)
    return (
        stage.provider,
        f"{role_of(k, len(cluster.stages))} · {units.short_count(part.parameters)}",
        f"{milliseconds(stage.compute_seconds)} ms · {busy} %",
    )


def milliseconds(seconds: float) -> str:
    """0.0243 as "24.3", with three significant digits."""
    value = seconds * 1000
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.01 or value == 0 else "<0.01"


def _box(texts: tuple[str, ...], inside: int) -> list[str]:
    lines = []
    for text in texts:
        shown = text if cell_len(text) <= inside else f"{set_cell_size(text, inside - 1)}…"
        lines.append(f"│ {set_cell_size(shown, inside)} │")
    edge = "─" * (inside + 2)
    return [f"┌{edge}┐", *lines, f"└{edge}┘"]


def _link(dry: DryRun, cluster: Cluster, number: int) -> list[str]:
    """The bandwidth forth above, the bandwidth back below, and the round trip between them."""
    lines = dry.line_before(cluster, number)
    assert lines is not None, "the first stage has no link before it"
    there, back = lines
    codec = cluster.stages[number].codec
    shown = "" if codec == "float32" else f" {codec} "
    forth, home = shown.center(_LINK - 1, "─") + "▶", "◀" + "─" * (_LINK - 1)
    if there == back == Line():
        return ["", forth, "no limit", home, ""]
    seconds = there.latency_seconds + back.latency_seconds
    trip = f"{milliseconds(seconds)} ms"
    if dry.relayed(cluster, number):
        trip = f"relay {seconds * 1000:.0f} ms"
    return [rate(there.bytes_per_second), forth, trip, home, rate(back.bytes_per_second)]


def _rows(pieces: list[list[str]], width: int) -> list[list[str]]:
    """Boxes and links side by side, as many as fit. A link is always in the row of the box before it."""
    rows: list[list[str]] = []
    row = [""] * _ROWS
    for place, piece in enumerate(pieces):
        is_link = place % 2 == 1
        cells = _LINK if is_link else cell_len(piece[0])
        follows = _LINK if not is_link and place + 1 < len(pieces) else 0
        if not is_link and row[0] and cell_len(row[0]) + cells + follows > width:
            # The last box needs no room for a link after it.
            rows.append([line.rstrip() for line in row])
            row = [""] * _ROWS
        row = [line + (_centred(text) if is_link else text) for line, text in zip(row, piece, strict=True)]
    rows.append([line.rstrip() for line in row])
    return rows


def _centred(text: str) -> str:
    if cell_len(text) > _LINK:
        return set_cell_size(text, _LINK)
    left = (_LINK - cell_len(text)) // 2
    return set_cell_size(" " * left + text, _LINK)

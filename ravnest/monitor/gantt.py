"""Gantt chart of a trace as SVG without scripts: what each stage computed, sent and received, over time."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from ravnest.errors import printable
from ravnest.monitor.steady import StageFigures, Stretch
from ravnest.monitor.trace import TraceSpan, in_rows

# The palette of Okabe and Ito, for colour-blind readers; waits have a pattern in addition.
COLOURS: Final = {
    "forward": "#0072b2",
    "backward": "#e69f00",
    "weights": "#f0e442",
    "update": "#009e73",
    "evaluate": "#cc79a7",
    "average": "#d55e00",
    "save": "#5b5b5b",
    "wait nothing ready": "url(#nothing)",
    "wait limit": "url(#limit)",
    "send forward": "#56b4e9",
    "send backward": "#f2c879",
    "receive forward": "#0072b2",
    "receive backward": "#e69f00",
}
MEANINGS: Final = {
    "forward": "forward",
    "backward": "backward",
    "weights": "weights' gradients",
    "update": "update",
    "evaluate": "evaluation",
    "average": "averaging",
    "save": "saving",
    "wait nothing ready": "waits: nothing is ready",
    "wait limit": "waits: in-flight limit reached",
    "send forward": "sends activations",
    "send backward": "sends gradients",
}

_WIDTH: Final = 1240
_LEFT: Final = 190
_TOP: Final = 8
_BAR: Final = 26
_LANE: Final = 7
_GAP: Final = 16
_LANES: Final = {"send forward": ("send forward",), "send backward": ("send backward",)}
_ARRIVALS: Final = ("receive forward", "receive backward")
_LIGHT: Final = ("backward", "weights")
"""Kinds whose colour is light and needs dark text."""
_MAX_PIECES: Final = 20_000


def gantt(stretch: Stretch, began: float, ended: float) -> str:
    """Chart of a cluster's stages between two moments on the axis of the trace."""
    scale = (_WIDTH - _LEFT - 10) / max(ended - began, 1e-9)
    height_each = _BAR + 3 * _LANE + _GAP
    bottom = _TOP + len(stretch.stages) * height_each
    parts = [_opening(bottom + 34), _PATTERNS, *_axis(began, ended, scale, bottom)]
    room = _MAX_PIECES // max(1, len(stretch.stages))
    for number, figures in enumerate(stretch.stages):
        top = _TOP + number * height_each
        parts += _label(figures, top, stretch.steady)
        rows = in_rows(figures.stage.spans)
        pieces = [*_pieces(rows["compute"], began, ended, scale, top, _BAR, figures)]
        for lane, row in enumerate(_LANES):
            pieces += _pieces(rows[row], began, ended, scale, top + _BAR + 1 + lane * _LANE, _LANE - 1, figures)
        for row in _ARRIVALS:
            pieces += _pieces(rows[row], began, ended, scale, top + _BAR + 1 + 2 * _LANE, _LANE - 1, figures)
        parts += pieces[:room]
    return "\n".join([*parts, "</svg>"])


def legend(stretch: Stretch, began: float, ended: float) -> str:
    """Legend of the colours that occur between two moments."""
    spans = [span for figures in stretch.stages for span in figures.stage.spans]
    there = {_look(span) for span in spans if span.ended > began and span.began < ended}
    parts = []
    for look, meaning in MEANINGS.items():
        if look in there:
            swatch = f'<svg width="16" height="12"><rect width="16" height="12" rx="2" fill="{COLOURS[look]}"/></svg>'
            parts.append(f'<span class="key">{swatch} {escape(meaning)}</span>')
    if any(look.startswith("receive") for look in there):
        parts.append('<span class="key">lowest line: arrivals of activations (blue) and gradients (orange)</span>')
    return f'<p class="legend">{" ".join(parts)}</p>'


def _opening(height: int) -> str:
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    return f'<svg class="gantt" xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="what each stage did">'


_PATTERNS: Final = """<defs>
<pattern id="nothing" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="#ededed"/>
<circle cx="3" cy="3" r="0.9" fill="#9a9a9a"/></pattern>
<pattern id="limit" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="6" height="6" fill="#ededed"/><rect width="2" height="6" fill="#9a9a9a"/></pattern>
</defs>"""


def _label(figures: StageFigures, top: float, steady: bool) -> Iterator[str]:
    stage = figures.stage
    name = escape(printable(stage.provider[:24]))
    yield f'<text x="4" y="{top + 12}" class="name">stage {stage.stage} {escape(stage.role)}</text>'
    yield f'<text x="4" y="{top + 26}" class="dim">{name}</text>'
    if steady:
        yield f'<text x="{_LEFT - 12}" y="{top + 12}" class="busy">{figures.busy_fraction:.1%} busy</text>'
    yield f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT - 10}" height="{_BAR}" class="ground"/>'


def _pieces(
    spans: Sequence[TraceSpan],
    began: float,
    ended: float,
    scale: float,
    top: float,
    height: float,
    figures: StageFigures,
) -> Iterator[str]:
    for span in spans:
        if span.ended < began or span.began > ended:
            continue
        left = _LEFT + (max(span.began, began) - began) * scale
        width = (min(span.ended, ended) - max(span.began, began)) * scale
        look = _look(span)
        # An arrival takes next to no time; it is drawn wide enough to be seen.
        width = max(width, 1.6 if span.kind == "receive" else 0.2)
        title = f"{_told(span)}, {_time(span.ended - span.began)}, at {_time(span.began - began)}"
        rect = f'<rect x="{left:.2f}" y="{top:.1f}" width="{width:.2f}" height="{height}" fill="{COLOURS[look]}">'
        yield f"{rect}<title>stage {figures.stage.stage}: {escape(title)}</title></rect>"
        label = str(span.microbatch)
        if span.kind in ("forward", "backward", "update") and width > 7 * len(label) + 4:
            ink = "dark" if span.kind in _LIGHT else "light"
            yield f'<text x="{left + width / 2:.2f}" y="{top + height / 2 + 3.5:.1f}" class="{ink}">{label}</text>'


def _axis(began: float, ended: float, scale: float, bottom: float) -> Iterator[str]:
    step = _step(ended - began)
    for count in range(int((ended - began) / step) + 1):
        at = _LEFT + count * step * scale
        yield f'<line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{bottom}" class="grid"/>'
        yield f'<text x="{at:.1f}" y="{bottom + 16}" class="tick">{_time(count * step)}</text>'


def _step(length: float) -> float:
    """A round number that divides the length into about ten steps."""
    rough = max(length, 1e-9) / 10
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * times for times in (1, 2, 5, 10) if power * times >= rough * 0.999)


def _look(span: TraceSpan) -> str:
    return f"{span.kind} {span.detail}" if f"{span.kind} {span.detail}" in COLOURS else span.kind


def _told(span: TraceSpan) -> str:
    what = {"send": f"sends {span.detail}", "receive": f"{span.detail} arrives", "wait": f"waits ({span.detail})"}
    of = "evaluation microbatch" if span.microbatch < 0 else "microbatch"
    return f"{what.get(span.kind, span.kind)}, {of} {abs(span.microbatch)}"


def _time(seconds: float) -> str:
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.0f} µs" if seconds else "0"
    return f"{seconds * 1e3:.4g} ms" if abs(seconds) < 1 else f"{seconds:.4g} s"

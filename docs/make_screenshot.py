"""Recorder of docs/images/demo.svg, the animation in the README: `make screenshot` runs this.

The script trains the demo's job on an embedded swarm, records the frames of the live display, and writes them into one
SVG, one below the other, as a strip that moves behind a window. A viewer without animations shows the last frame.
"""

import io
import os
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.jobfile import load_job
from ravnest.monitor.live import LiveDisplay
from ravnest.monitor.snapshot import RunSnapshot
from ravnest.monitor.summary import Summary

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "demo.svg"
JOB = "examples/digits/job.py"
PROVIDERS = 3

WIDTH = 90
FRAME_SECONDS = 0.4
"""Minimum time between two frames: the display draws more often than the animation needs."""
HOLD_SECONDS = 6.0
"""How long the last frame is shown before the animation restarts."""


class Recorder(LiveDisplay):
    """A live display that records each picture that it draws, with its time."""

    def __init__(self) -> None:
        self.frames: list[tuple[float, list[str]]] = []
        self._drawn = Console(
            record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor", width=WIDTH, highlight=False
        )
        self._above = [f"$ ravnest train {JOB} --providers {PROVIDERS}"]
        super().__init__(self._drawn)

    def show(self, snapshot: RunSnapshot) -> None:
        super().show(snapshot)
        if not self.frames or snapshot.elapsed_seconds - self.frames[-1][0] >= FRAME_SECONDS:
            self._keep(snapshot.elapsed_seconds)
        self._drawn.export_text()

    def message(self, text: str) -> None:
        super().message(text)
        self._above.append(text)
        self._drawn.export_text()

    def finish(self, summary: Summary) -> None:
        super().finish(summary)
        self._keep(summary.seconds)

    def close(self) -> None:
        super().close()
        # The display clears its picture here; the recording would keep it above the last one.
        self._drawn.export_text()

    def _keep(self, seconds: float) -> None:
        picture = self._drawn.export_text(styles=True).rstrip("\n").split("\n")
        self.frames.append((seconds, [*self._above, *picture]))


def film(frames: list[tuple[float, list[str]]]) -> str:
    """The frames as one SVG: a strip that moves behind a window, frame by frame, at the speed of the recorded run."""
    height = max(len(lines) for _, lines in frames) + 1
    strip = Console(
        record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor", width=WIDTH, highlight=False
    )
    for _, lines in frames:
        for line in [*lines, *[""] * (height - len(lines))]:
            strip.print(Text.from_ansi(line), no_wrap=True, crop=True)
    first, last = frames[0][0], frames[-1][0]
    total = last - first + HOLD_SECONDS
    line_height = 24.4
    steps = "".join(
        f"{(seconds - first) / total:.3%} {{{{ transform: translateY(-{number * height * line_height:.1f}px) }}}} "
        for number, (seconds, _) in enumerate(frames)
    )
    template = _TEMPLATE.format(
        window_width=round(WIDTH * 12.2 + 34),
        window_height=round(height * line_height + 24),
        frame_height=f"{height * line_height:.1f}",
        back=SVG_EXPORT_THEME.background_color.hex,
        steps=steps,
        seconds=f"{total:.1f}",
        rest=f"{(len(frames) - 1) * height * line_height:.1f}",
    )
    picture = strip.export_svg(title="", code_format=template, unique_id="t")
    return re.sub(r' clip-path="url\(#t-line-\d+\)"', "", picture)


# The console replaces the names in double braces when it exports the picture.
_TEMPLATE = """<svg viewBox="0 0 {window_width} {window_height}" xmlns="http://www.w3.org/2000/svg" role="img" \
aria-label="Recording of ravnest train on three providers">
<style>
.t-matrix {{{{ font: 20px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre }}}}
{{styles}}
@keyframes film {{{{ {steps} }}}}
.film {{{{ transform: translateY(-{rest}px); animation: film {seconds}s step-end infinite }}}}
@media (prefers-reduced-motion: reduce) {{{{ .film {{{{ animation: none }}}} }}}}
</style>
<clipPath id="window"><rect width="{window_width}" height="{frame_height}"/></clipPath>
<rect width="{window_width}" height="{window_height}" rx="10" fill="{back}"/>
<g transform="translate(17, 17)" clip-path="url(#window)"><g class="film">
{{backgrounds}}
<g class="t-matrix">
{{matrix}}
</g>
</g></g>
</svg>
"""


def main() -> int:
    """Trains, records and writes the picture; returns the exit code."""
    job = load_job(str(ROOT / JOB))
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        # The picture contains the path of the run directory: a relative one, as a user sees it.
        os.chdir(folder)
        with EmbeddedSwarm(PROVIDERS) as swarm:
            result = swarm.train(job, name="digits", display=recorder)
        os.chdir(ROOT)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(film(recorder.frames), encoding="utf-8")
    sys.stdout.write(f"{PICTURE.relative_to(ROOT)}: {len(recorder.frames)} frames, {result.summary.eval}\n")
    return 0 if result.summary.status == "finished" else 1


if __name__ == "__main__":
    sys.exit(main())

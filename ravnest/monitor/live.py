"""Live display of a run on a terminal: a progress bar, the key figures, and a line per stage."""

import atexit
import contextlib
import io
import re
import threading
from collections import deque
from pathlib import Path
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ravnest import units
from ravnest.errors import printable
from ravnest.monitor.files import write_atomic
from ravnest.monitor.report import averaging_in_words, final_facts, headline
from ravnest.monitor.snapshot import RunSnapshot
from ravnest.monitor.summary import Summary

_LINES_AROUND_STAGES: Final = 9
_BUSY_WIDTH: Final = 8
_KEPT_MESSAGES: Final = 100


class LiveDisplay:
    """Redraws the display on `console` whenever `show` is called; thread-safe, without a thread of its own.

    The cursor is restored at `finish`, at `close`, when drawing fails, and at the latest when the interpreter exits.
    Other output appears above the display. If the terminal disappears, the run continues without a display.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console if console is not None else Console(highlight=False)
        self._live: Live | None = None
        self._lock = threading.RLock()
        self._closed = False
        self._messages: deque[Text] = deque(maxlen=_KEPT_MESSAGES)
        self._snapshot: RunSnapshot | None = None
        self._summary: Summary | None = None

    def show(self, snapshot: RunSnapshot) -> None:
        with self._lock:
            if not self._closed:
                self._snapshot = snapshot
                self._draw(_picture(snapshot, max_stages=max(1, self._console.height - _LINES_AROUND_STAGES)))

    def message(self, text: str) -> None:
        line = Text(printable(text))
        self._messages.append(line)
        if not self._closed:
            self._print(line)

    def finish(self, summary: Summary) -> None:
        if self._closed:
            return
        self._summary = summary
        self.close()
        self._print(self._last_picture())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            live, self._live = self._live, None
            if live is not None:
                atexit.unregister(self.close)
                with contextlib.suppress(OSError):
                    live.stop()

    def export_svg(self, path: Path, title: str = "ravnest") -> None:
        """Saves the messages and the latest view as an SVG of the same width, for documentation."""
        console = Console(
            record=True,
            file=io.StringIO(),
            width=self._console.width,
            force_terminal=True,
            highlight=False,
            color_system="truecolor",
        )
        for message in self._messages:
            console.print(message)
        console.print(self._last_picture())
        # The SVG uses local fonts: a picture in a README should not load anything from the network.
        picture = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title), flags=re.DOTALL)
        write_atomic(path, picture)

    def _draw(self, picture: RenderableType) -> None:
        try:
            if self._live is None:
                self._live = Live(picture, console=self._console, auto_refresh=False, transient=True)
                atexit.register(self.close)
                self._live.start(refresh=True)
            else:
                self._live.update(picture, refresh=True)
        except OSError:
            self.close()
        except BaseException:
            self.close()
            raise

    def _print(self, picture: RenderableType) -> None:
        try:
            self._console.print(picture)
        except OSError:
            self.close()

    def _last_picture(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._snapshot is not None:
            if self._summary is None:
                return _picture(self._snapshot, max_stages=len(self._snapshot.stages))
            if self._snapshot.stages:
                parts = [Text(), _stage_table(self._snapshot), Text()]
        if self._summary is not None:
            parts.append(_results(self._summary))
        return Group(*parts)


def _picture(snapshot: RunSnapshot, max_stages: int) -> RenderableType:
    parts: list[RenderableType] = [Text(), _title(snapshot)]
    if snapshot.samples_total or snapshot.samples_done:
        parts += [_bar(snapshot), _numbers(snapshot)]
    if snapshot.eval:
        parts.append(_named("evaluation", units.metrics(snapshot.eval)))
    if snapshot.averaging is not None:
        last = f"; {snapshot.last_round}" if snapshot.last_round else ""
        parts.append(_named("averaging", f"{averaging_in_words(snapshot.averaging)}{last}"))
    if snapshot.in_flight:
        parts.append(_named("in flight", snapshot.in_flight))
    if snapshot.standstill:
        parts.append(Text(printable(snapshot.standstill), style="yellow", no_wrap=True, overflow="ellipsis"))
    if snapshot.stages:
        shown = (snapshot.averaging is not None) + bool(snapshot.in_flight) + bool(snapshot.standstill)
        room = max_stages - len(snapshot.clusters) - shown
        parts += [Text(), _stage_table(snapshot, room := max(1, room))]
        hidden = len(snapshot.stages) - room
        if hidden > 0:
            parts.append(Text(f"… and {hidden} more stages", style="dim"))
    return Group(*parts)


def _title(snapshot: RunSnapshot) -> RenderableType:
    left = Text()
    if snapshot.title:
        left.append(printable(snapshot.title), style="bold")
        left.append("  ")
    left.append(snapshot.phase, style="cyan")
    if snapshot.detail:
        left.append(f": {printable(snapshot.detail)}")
    if snapshot.epoch and snapshot.epochs:
        left.append(f"  epoch {snapshot.epoch}/{snapshot.epochs}")
    right = Text(f"{units.duration(snapshot.elapsed_seconds)} elapsed", style="dim")
    if snapshot.eta_seconds is not None:
        right = Text.assemble(f"{units.duration(snapshot.eta_seconds)} left", "  ", right)
    return _two_sides(left, right)


def _bar(snapshot: RunSnapshot) -> RenderableType:
    total = snapshot.samples_total
    done = Text(units.count(snapshot.samples_done))
    if total is not None:
        done.append(f"/{units.count(total)}", style="dim")
    done.append(" samples", style="dim")
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    bar = ProgressBar(
        # Without a known total the bar pulses.
        total=total if total else None,
        completed=snapshot.samples_done,
        pulse=not total,
        animation_time=snapshot.elapsed_seconds,
        style="grey30",
        complete_style="cyan",
        finished_style="green",
    )
    grid.add_row(bar, done)
    return grid


def _numbers(snapshot: RunSnapshot) -> RenderableType:
    left = Text()
    left.append("loss ", style="dim")
    left.append("…" if snapshot.train_loss is None else units.metric(snapshot.train_loss))
    left.append("   ")
    left.append(units.sample_rate(snapshot.samples_per_second))
    left.append(" samples/s", style="dim")
    if snapshot.predicted_samples_per_second:
        left.append(f" (planned {units.sample_rate(snapshot.predicted_samples_per_second)})", style="dim")
    return _two_sides(left, Text(f"{units.count(snapshot.updates)} updates", style="dim"))


def _named(name: str, value: str) -> Text:
    # Exactly one line: the room for the stage table is computed from the number of lines.
    return Text.assemble((f"{name} ", "dim"), printable(value), no_wrap=True, overflow="ellipsis")


def _stage_table(snapshot: RunSnapshot, max_stages: int | None = None) -> Table:
    """A line for each of the first `max_stages` stages; with several clusters, a line before the stages of each."""
    table = Table(box=None, expand=True, header_style="dim", padding=(0, 1), pad_edge=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("provider", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("device", no_wrap=True)
    table.add_column("params", justify="right", no_wrap=True)
    table.add_column("busy", no_wrap=True)
    table.add_column("staleness", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    clusters = iter(snapshot.clusters)
    for view in snapshot.stages[:max_stages]:
        if not view.stage and (begun := next(clusters, None)) is not None:
            cluster, lost = begun
            rate = f"{units.sample_rate(cluster.samples_per_second)} samples/s, {units.count(cluster.samples)} samples"
            rate += "" if cluster.in_flight is None else f", {cluster.in_flight} in flight"
            told = f"lost: {printable(lost)}" if lost else rate
            table.add_row(f"cluster {cluster.id}", Text(told, style="red" if lost else "dim"))
        table.add_row(
            Text.assemble(f"{view.stage} ", (printable(view.role), "dim")),
            Text(printable(view.provider)),
            Text(printable(view.device), style="dim"),
            units.short_count(view.parameters),
            _busy(view.busy_fraction),
            Text.assemble(f"{view.staleness.mean:.1f}", (f" max {view.staleness.max}", "dim")),
            units.byte_size(view.peak_memory_bytes),
        )
    return table


def _busy(fraction: float) -> RenderableType:
    grid = Table.grid(padding=(0, 1, 0, 0))
    bar = ProgressBar(
        total=1.0,
        completed=min(1.0, max(0.0, fraction)),
        width=_BUSY_WIDTH,
        style="grey30",
        complete_style="cyan",
        finished_style="cyan",
    )
    grid.add_row(bar, f"{fraction:4.0%}")
    return grid


def _results(summary: Summary) -> RenderableType:
    style = {"finished": "bold green", "stopped": "bold yellow"}.get(summary.status, "bold red")
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in final_facts(summary):
        grid.add_row(name, Text(printable(value), style="bold" if name in ("evaluation", "model") else ""))
    return Group(Text(printable(headline(summary)), style=style), grid)


def _two_sides(left: Text, right: Text) -> Table:
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, right)
    return grid

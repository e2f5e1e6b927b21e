"""Display of a run for the requester: a live view on a terminal, log lines elsewhere, or nothing."""

from time import monotonic
from typing import Final, Protocol, TextIO

from rich.console import Console

from ravnest import units
from ravnest.errors import printable
from ravnest.monitor.live import LiveDisplay
from ravnest.monitor.report import final_lines
from ravnest.monitor.snapshot import RunSnapshot
from ravnest.monitor.summary import Summary
from ravnest.units import counted

PLAIN_SECONDS: Final = 5.0


class Display(Protocol):
    """Output of a run for its user. After `finish` or `close` nothing more is shown."""

    def show(self, snapshot: RunSnapshot) -> None:
        """Shows the current state of the run; cheap, may be called a few times a second."""

    def message(self, text: str) -> None:
        """Shows one line that stays on the screen: a warning, a fault, an invite."""

    def finish(self, summary: Summary) -> None:
        """Shows the result of the run."""

    def close(self) -> None:
        """Restores the terminal; may be called at any time and repeatedly."""


def open_display(enabled: bool, stream: TextIO) -> Display:
    """The display that fits `stream`: live on a terminal, log lines elsewhere, nothing if not enabled."""
    if not enabled:
        return QuietDisplay()
    console = Console(file=stream, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return PlainDisplay(stream)


class PlainDisplay:
    """Log lines: one for each new phase and each evaluation, otherwise at most one every five seconds."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._phases: set[str] = set()
        self._last_line = -PLAIN_SECONDS
        self._last_progress = ""
        self._last_eval: dict[str, float] | None = None
        self._elapsed_seconds = 0.0
        self._closed = False

    def show(self, snapshot: RunSnapshot) -> None:
        self._elapsed_seconds = snapshot.elapsed_seconds
        evaluation = None if snapshot.eval is None else dict(snapshot.eval)
        if evaluation is not None and evaluation != self._last_eval:
            self._last_eval = evaluation
            self._line(f"evaluation   {units.metrics(evaluation)}")
        now, progress = monotonic(), _progress(snapshot)
        waited = now - self._last_line >= PLAIN_SECONDS and progress != self._last_progress
        if snapshot.phase not in self._phases or waited:
            self._phases.add(snapshot.phase)
            self._last_line, self._last_progress = now, progress
            self._line(progress)

    def message(self, text: str) -> None:
        self._line(text)

    def finish(self, summary: Summary) -> None:
        self._elapsed_seconds = max(self._elapsed_seconds, summary.seconds)
        for line in final_lines(summary):
            self._line(line)
        self.close()

    def close(self) -> None:
        self._closed = True

    def _line(self, text: str) -> None:
        if self._closed:
            return
        try:
            print(f"[{self._elapsed_seconds:7.1f} s] {printable(text)}", file=self._stream, flush=True)
        except OSError:
            # The reader is gone (`| head`, a closed terminal); the run continues without output.
            self._closed = True


class QuietDisplay:
    """Shows nothing."""

    def show(self, snapshot: RunSnapshot) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def finish(self, summary: Summary) -> None:
        pass

    def close(self) -> None:
        pass


def _progress(snapshot: RunSnapshot) -> str:
    parts = [f"{snapshot.phase}: {snapshot.detail}" if snapshot.detail else snapshot.phase]
    if snapshot.epoch and snapshot.epochs:
        parts.append(f"epoch {snapshot.epoch}/{snapshot.epochs}")
    if snapshot.samples_done:
        total = "" if snapshot.samples_total is None else f"/{units.count(snapshot.samples_total)}"
        parts.append(f"{units.count(snapshot.samples_done)}{total} samples")
    if snapshot.train_loss is not None:
        parts.append(f"loss {units.metric(snapshot.train_loss)}")
    if snapshot.samples_per_second:
        parts.append(f"{units.sample_rate(snapshot.samples_per_second)} samples/s")
    if snapshot.averaging is not None and snapshot.averaging.rounds:
        parts.append(f"{counted(snapshot.averaging.rounds, 'round')} of averaging")
    if snapshot.eta_seconds is not None:
        parts.append(f"{units.duration(snapshot.eta_seconds)} left")
    return "   ".join(parts)

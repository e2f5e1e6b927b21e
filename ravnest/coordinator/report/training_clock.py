"""Training clock: how long the run has trained, and at what rate.

Evaluation, saving and redeployment pause the clock, so that the rates are those of training.
"""

import time
from collections import deque
from collections.abc import Callable

from ravnest.coordinator.feed.ledger import Ledger

_WINDOW_SECONDS = 5.0
_HALT_SECONDS = 2.0


class TrainingClock:
    """The time and the rates of one run, whose samples the ledger counts."""

    def __init__(
        self, ledger: Ledger, started: float | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`started` is when the command began, on the same clock."""
        self.started_at = time.time()
        """When this session began, in seconds since 1970."""
        self.first_update_seconds: float | None = None
        """Time from the start of the command to the first completed microbatch."""
        self.samples_at_start = ledger.samples
        """Samples that were trained on before this session."""
        self._ledger = ledger
        self._clock = clock
        self._started = clock() if started is None else started
        self._training_since: float | None = None
        """When training began or resumed; None while the clock is paused."""
        self._training_seconds = 0.0
        self._warmup_seconds = 0.0
        self._warmup_samples = 0
        self._recent: deque[tuple[float, int]] = deque()
        """Times of the last completed microbatches, each with the samples until then."""

    @property
    def elapsed_seconds(self) -> float:
        return self._clock() - self._started

    def run(self) -> None:
        """Training goes on."""
        if self._training_since is None:
            self._training_since = self._clock()
            self._recent.append((self._training_since, self._ledger.samples))

    def pause(self) -> None:
        """Training stands still, for an evaluation or a checkpoint."""
        if self._training_since is not None:
            self._training_seconds += self._clock() - self._training_since
            self._training_since = None
            self._recent.clear()

    def on_microbatch(self) -> None:
        """A microbatch has been completed."""
        now = self._clock()
        if self.first_update_seconds is None:
            self.first_update_seconds = now - self._started
            self._end_warmup(now)
        self._recent.append((now, self._ledger.samples))
        while len(self._recent) > 2 and now - self._recent[0][0] > _WINDOW_SECONDS:
            self._recent.popleft()

    def samples_per_second(self) -> float:
        """The rate over the whole training time so far, from the first completed microbatch on."""
        seconds = self._training_seconds
        if self._training_since is not None:
            seconds += self._clock() - self._training_since
        samples = self._ledger.samples - self.samples_at_start
        if samples > self._warmup_samples:
            samples -= self._warmup_samples
        else:
            # Only the warm-up has been completed: its rate is the only one there is.
            seconds += self._warmup_seconds
        return samples / seconds if seconds else 0.0

    def recent_samples_per_second(self) -> float:
        """The rate over the last few seconds."""
        if len(self._recent) < 2 or self._recent[-1][0] <= self._recent[0][0]:
            return self.samples_per_second()
        (first, before), (last, after) = self._recent[0], self._recent[-1]
        now = self._clock()
        # A run that has come to a halt must not keep showing the rate that it had.
        return (after - before) / ((now if now - last > _HALT_SECONDS else last) - first)

    def _end_warmup(self, now: float) -> None:
        """The first microbatch starts every process and fills the pipeline: its time says nothing about the rate."""
        if self._training_since is not None:
            self._warmup_seconds = now - self._training_since
            self._training_since = now
            self._warmup_samples = self._ledger.samples - self.samples_at_start

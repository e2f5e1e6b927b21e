"""Averaging interval of a plan's clusters, from what its rounds are predicted or measured to take."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ravnest.planner.rings.round_time import RoundTime
from ravnest.settings import Averaging
from ravnest.state_budget import BUDGET_SHARE
from ravnest.units import duration

MIN_UPDATES: Final = 10
"""Minimum updates of each cluster between two rounds, so that every round averages more than a few microbatches."""

EAGER_UPDATES: Final = 40
"""Updates of each cluster between two rounds up to which a longer interval is better than a codec that loses more."""

ROUND_SHARE: Final = 2
"""Minimum interval between rounds, after the clusters have joined, in durations of a reduce: lines and machines rest in
between."""

BLOCKING_SHARE: Final = 4
"""The same where training waits for rounds."""

MAX_SLOWDOWN: Final = 0.03
"""Maximum share of a machine's time that rounds take from training."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The time between two rounds."""

    samples: int
    """The samples of all clusters together."""
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class RoundBasis:
    """Everything that the interval between rounds follows from."""

    settings: Averaging
    rates: tuple[float, ...]
    """Samples per second of each cluster."""
    samples: int
    """The samples of a microbatch."""
    accumulate: int
    """Microbatches of an update."""
    fragments: int
    time: RoundTime
    """Predicted, for the fragment that takes longest."""

    def interval(self, measured: tuple[float, float] | None = None) -> Interval:
        """The interval if joining and the rest of a round take these seconds; None: as long as predicted."""
        return average_every(
            self.settings, self.rates, self.samples, self.accumulate, self.time, self.fragments, measured
        )


def samples_of_updates(updates: int, rates: Sequence[float], samples: int, accumulate: int, fragments: int) -> float:
    """Samples of all clusters while the slowest makes this many updates for each fragment."""
    return updates * accumulate * samples * sum(rates) / min(rates) / fragments


def average_every(
    settings: Averaging,
    rates: Sequence[float],
    samples: int,
    accumulate: int,
    time: RoundTime,
    fragments: int,
    measured: tuple[float, float] | None = None,
) -> Interval:
    """Number of samples of all clusters between two rounds, and why.

    `rates` are the clusters' samples per second, `samples` those of a microbatch, and `accumulate` microbatches make an
    update. A setting of the job decides. Otherwise every cluster makes MIN_UPDATES updates before everything has been
    averaged once, in `fragments` rounds; state keeps to its budget of every line; rounds take MAX_SLOWDOWN of any
    machine's time at most; and a round is over well before the next. `measured`: the seconds until all clusters have
    joined a round, and those of its rest.
    """
    together = sum(rates)
    joining, reducing = measured or (time.joining_seconds, time.reducing_seconds)
    seconds = joining + reducing
    takes = f"a round takes {duration(seconds)}"
    if settings.every is not None:
        between = settings.every / together
        late = ", and the next one begins late" if seconds > between else ""
        return _interval(settings.every, between, f"as averaging.every says; {takes}{late}")
    in_turn = f" between two of the same of {fragments} fragments" if fragments > 1 else ""
    share = BLOCKING_SHARE if settings.blocking else ROUND_SHARE
    wanted = {
        f"so that every cluster has made {MIN_UPDATES} updates{in_turn}": samples_of_updates(
            MIN_UPDATES, rates, samples, accumulate, fragments
        ),
        f"so that state takes at most {BUDGET_SHARE:.0%} of a line": together * time.budget_seconds,
        f"so that rounds slow training by at most {MAX_SLOWDOWN:.0%}": together * time.coding_seconds / MAX_SLOWDOWN,
        "so that one is over well before the next": together * (joining + share * reducing),
    }
    why = max(wanted, key=lambda name: wanted[name])
    every = max(1, math.ceil(wanted[why]))
    return _interval(every, every / together, f"{why}; {takes}")


def _interval(samples: int, seconds: float, why: str) -> Interval:
    return Interval(samples, seconds, f"a round every {samples:,} samples, {duration(seconds)}, {why}")

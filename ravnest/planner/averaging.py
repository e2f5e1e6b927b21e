"""Averaging interval of a plan's clusters."""

import math
from collections.abc import Sequence
from typing import Final

from ravnest.settings import Averaging

MIN_UPDATES: Final = 10
"""Minimum updates of each cluster between two rounds, so that every round averages more than a few microbatches."""

ROUND_SHARE: Final = 4
"""Minimum interval between rounds, in durations of a round: lines carry both for at most a quarter of the time."""


def average_every(
    settings: Averaging,
    rates: Sequence[float],
    samples: int,
    accumulate: int,
    round_seconds: float,
    fragments: int,
) -> tuple[int, str]:
    """Number of samples of all clusters between two rounds, and why.

    `rates` are the clusters' samples per second, `samples` those of a microbatch, and `accumulate` microbatches make an
    update. A setting of the job decides. Otherwise every cluster makes MIN_UPDATES updates before everything has been
    averaged once, in `fragments` rounds, and rounds are at least ROUND_SHARE times their duration apart.
    """
    if settings.every is not None:
        return settings.every, f"a round after every {settings.every:,} samples, as averaging.every says"
    together = sum(rates)
    learned = MIN_UPDATES * accumulate * samples * together / min(rates) / fragments
    lasting = ROUND_SHARE * round_seconds * together
    every = max(1, math.ceil(max(learned, lasting)))
    if lasting > learned:
        why = f"{ROUND_SHARE} times as long as one takes, which is {round_seconds:.3g} s"
    else:
        in_turn = f" between two of the same of {fragments} fragments" if fragments > 1 else ""
        why = f"so that every cluster has made {MIN_UPDATES} updates{in_turn}"
    return every, f"a round after every {every:,} samples: {why}"

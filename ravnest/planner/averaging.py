"""How often the clusters of a plan average."""

import math
from collections.abc import Sequence
from typing import Final

from ravnest.settings import Averaging

MIN_UPDATES: Final = 10
"""Of each cluster between two rounds: so that what is averaged has been learned from more than a few microbatches."""

ROUND_SHARE: Final = 4
"""Times as long as a round takes, rounds are apart: at most a quarter of the time lines carry both."""


def average_every(
    settings: Averaging,
    rates: Sequence[float],
    samples: int,
    accumulate: int,
    round_seconds: float,
    fragments: int,
) -> tuple[int, str]:
    """How many samples of all clusters together lie between two rounds, and why.

    The clusters have these rates, in samples a second, and microbatches of so many samples, of which `accumulate` make
    an update. What the job says counts. Otherwise every cluster makes a number of updates before everything has been
    averaged once, which takes `fragments` rounds; and a round takes a small part of the time until the next.
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

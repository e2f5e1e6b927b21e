"""`python -m tests.soak --minutes 120`: trains for so long, tells what has grown; exit code 1 when anything has."""

import argparse
import math
import sys
import tempfile
from pathlib import Path

from tests.soak.soaking import soak, write


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--providers", type=int, default=2)
    parser.add_argument("--clusters", type=int, default=1)
    parser.add_argument(
        "--most-a-second",
        metavar="BATCHES",
        type=float,
        default=math.inf,
        help="train no faster than this, to leave the machine to others meanwhile (default: as fast as it can)",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every measurement here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seen = soak(
            Path(folder),
            given.minutes,
            given.providers,
            given.clusters,
            lambda text: print(text, flush=True),
            given.max_a_second,
        )
    if given.json is not None:
        write(seen, given.json)
    growths = list(seen.growths())
    for found in growths:
        print("GROWS  " if found.grows else "       ", found)
    print(f"{seen.updates[-1][1]:,} updates; the slowest third trained at {seen.slowest_third():.0%} of the mean rate")
    return 1 if any(found.grows for found in growths) or seen.slowest_third() < 0.2 else 0


if __name__ == "__main__":
    sys.exit(main())

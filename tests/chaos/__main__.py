"""Command line of the chaos tests: `make chaos MINUTES=30`, or

    python -m tests.chaos --minutes 30 [--seed N] [--clusters C] [--stages N] [--standbys N] [--only CASE ...]

Prints each fault with the time until training continued, and a table at the end. Exit code 1: a promise was broken. The
same seed gives the same schedule.
"""

import argparse
import random
import sys
from pathlib import Path

from benchmarks.homes_parts.population import FIVE
from tests.chaos.chaos import cases_for, run_chaos
from tests.chaos.schedule import cases
from tests.wan import Lab


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, help="duration of the faults (default: until each case has run once)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="seed of the schedule")
    parser.add_argument("--clusters", type=int, default=1)
    parser.add_argument("--stages", type=int, default=3, help="stages of each cluster")
    parser.add_argument("--standbys", type=int, default=2)
    parser.add_argument("--homes", action="store_true", help="home lines, some slow, far away or behind NAT")
    parser.add_argument("--every", type=float, default=0.0, metavar="SECONDS", help="minimum time between two cases")
    parser.add_argument("--only", action="append", metavar="CASE", help="such as 'kill leaf during round'; repeatable")
    parser.add_argument("--no-comparison", action="store_true", help="do not train without faults afterwards")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="new folder for the run and all output")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    args = parser.parse_args()
    among = cases(*args.only) if args.only else cases_for(args.clusters, args.stages)
    if args.list:
        print(*among, sep="\n")
        return 0
    if reason := Lab.unavailable():
        print(reason, file=sys.stderr)
        return 2
    report = run_chaos(
        args.minutes,
        args.seed,
        clusters=args.clusters,
        stages=args.stages,
        standbys=args.standbys,
        lines=FIVE if args.homes else None,
        among=among,
        every_seconds=args.every,
        compare=not args.no_comparison,
        keep=args.keep,
        tell=lambda text: print(text, flush=True),
    )
    print(report)
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())

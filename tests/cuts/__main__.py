"""Every way to cut random graphs into 2 to 4 stages, in the modes of a stage in turn. `make cuts`, or by hand:

    python -m tests.cuts [--graphs N] [--seed N] [--operators N] [--every-mode]

A cut that changes a loss, a metric, a gradient or a state, or that never completes a microbatch, is told with the seed
that draws its graph again. Exit code 1 when there was one.
"""

import argparse
import sys
import time
from random import Random

import torch

from tests.cuts.checking import check_every_cut
from tests.cuts.drawing import NotAModelError, drawn

GRAPHS = 300
OPERATORS = 7


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuts", description=__doc__.partition("\n")[0])
    parser.add_argument("--graphs", type=int, default=GRAPHS, help=f"how many ({GRAPHS})")
    parser.add_argument("--seed", type=int, default=0, help="of the first graph; each next one has the next (0)")
    parser.add_argument("--operators", type=int, default=OPERATORS, help=f"at most, before the loss ({OPERATORS})")
    parser.add_argument("--every-mode", action="store_true", help="run each cut in all modes of a stage, not in one")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    graphs = cuts = 0
    failures: list[str] = []
    seed = given.seed
    while graphs < given.graphs:
        random = Random(seed)
        seed += 1
        try:
            found = drawn(random, random.randint(2, given.operators))
        except NotAModelError:
            continue
        graphs += 1
        try:
            cuts += check_every_cut(found.graph, found.weights, found.batches, every_mode=given.every_mode).cuts
        except AssertionError as error:
            failures.append(f"--seed {seed - 1} --graphs 1: {error}")
            print(failures[-1], flush=True)
        if graphs % 25 == 0:
            print(f"{graphs} graphs, {cuts:,} cuts, {time.perf_counter() - began:.0f} s", flush=True)
    print(f"{graphs} graphs, {cuts:,} ways to cut them, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

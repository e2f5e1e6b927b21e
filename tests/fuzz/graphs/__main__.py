"""Long run of the graph fuzzer. Part of `make fuzz`, or on its own:

    python -m tests.fuzz.graphs [--graphs N] [--first NUMBER] [--minutes M]

A table shows the number of graphs in which each operator ran. Each failure is reported when it is found, and its graph
is kept. Exit code 1 after a failure, or if an operator never ran.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.graphs.memory import GuardedMemory, build, missing

GRAPHS = 20_000
_LIBRARY = "RAVNEST_GUARDED_MEMORY"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.graphs", description=__doc__.partition("\n")[0])
    parser.add_argument("--graphs", type=int, default=GRAPHS, help=f"number of graphs ({GRAPHS})")
    parser.add_argument("--first", type=int, default=0, help="number of the first one (0)")
    parser.add_argument("--minutes", type=float, default=600.0, help="maximum duration")
    parser.add_argument(
        "--failures", type=Path, default=Path("build/fuzz-graphs"), help="where failing graphs are kept"
    )
    args = parser.parse_args()
    if _LIBRARY in os.environ:
        return _fuzz(args, GuardedMemory(Path(os.environ[_LIBRARY])))
    reason = missing()
    if reason:
        print(f"without guard pages: {reason}", flush=True)
        return _fuzz(args, None)
    with tempfile.TemporaryDirectory(prefix="ravnest-fuzz-") as folder:
        library = str(build(Path(folder)))
        environment = {**os.environ, "LD_PRELOAD": library, _LIBRARY: library, "OMP_NUM_THREADS": "1"}
        return subprocess.run([sys.executable, "-m", "tests.fuzz.graphs", *sys.argv[1:]], env=environment).returncode


def _fuzz(args: argparse.Namespace, memory: GuardedMemory | None) -> int:
    import torch

    from tests.fuzz.graphs.cases import OPERATORS, case
    from tests.fuzz.graphs.isolated import Failure, trials

    # A process that forks must have a single thread, also in the backward.
    torch.set_num_threads(1)
    args.failures.mkdir(parents=True, exist_ok=True)

    def tell(failure: Failure) -> None:
        (args.failures / f"{failure.case.number}.json").write_text(failure.case.to_json())
        print(f"    {failure}", flush=True)

    started = time.monotonic()
    numbers = range(args.first, args.first + args.graphs)
    tally = trials(case, numbers, memory, tell, until=started + args.minutes * 60)
    width = max(map(len, OPERATORS)) + 2
    for place in range(0, len(OPERATORS), 2):
        pair = OPERATORS[place : place + 2]
        print("".join(f"{op:<{width}}{tally.ran[op]:>7,}    " for op in pair).rstrip())
    never = [op for op in OPERATORS if not tally.ran[op]]
    seconds = time.monotonic() - started
    print(
        f"{tally.graphs:,} graphs in {seconds:.0f} s, {tally.backwards:,} backwards, "
        f"{tally.ended['']:,} to the end, {len(tally.failures)} failures"
    )
    print("ended by: " + ", ".join(f"{name} {count:,}" for name, count in tally.ended.most_common(8) if name))
    if never:
        print("never ran: " + " ".join(never))
    return 1 if tally.failures or never else 0


if __name__ == "__main__":
    sys.exit(main())

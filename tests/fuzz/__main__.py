"""Long fuzzing run: every decoder against inputs of a coverage-guided fuzzer. `make fuzz`, or with fewer cases:

    python -m tests.fuzz [--runs N] [--target NAME ...]

Each target runs in a process of its own, with limits on memory and on the time of one case. A table shows the cases,
the crashes and the growth of memory; the input of a crash is kept and named. Exit code 1 after a crash, or if a target
did not run all its cases.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import psutil

RUNS = 12_000
CASE_SECONDS = 10
MEMORY_MB = 1500
GROWTH_MB = 300
"""Maximum growth of memory from the first to the last case. More is a leak, or an input that asked for too much."""


@dataclass(frozen=True)
class Outcome:
    name: str
    cases: int
    seconds: float
    growth_mb: int
    crash: str
    """The file with the crashing input, and the last line of the output; empty without a crash."""

    def passed(self, runs: int) -> bool:
        return not self.crash and self.cases >= runs and self.growth_mb <= GROWTH_MB


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=RUNS, help=f"cases per target ({RUNS})")
    parser.add_argument("--target", action="append", help="run only this target; may be repeated")
    parser.add_argument("--crashes", type=Path, default=Path("build/fuzz"), help="folder for crashing inputs")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.inside:
        _fuzz(args.inside, rest)
        return 0
    from tests.fuzz.targets import TARGETS

    args.crashes.mkdir(parents=True, exist_ok=True)
    names = args.target or [target.name for target in TARGETS]
    print(f"{'target':<20} {'cases':>8} {'crashes':>8} {'memory':>9} {'seconds':>8}", flush=True)
    outcomes = []
    for name in names:
        outcome = _run(name, args.runs, args.crashes)
        outcomes.append(outcome)
        memory, seconds = f"{outcome.growth_mb:+} MB", f"{outcome.seconds:.1f}"
        print(f"{name:<20} {outcome.cases:>8,} {bool(outcome.crash):>8} {memory:>9} {seconds:>8}", flush=True)
        if outcome.crash:
            print(f"    {outcome.crash}", flush=True)
    print(f"{'all':<20} {sum(outcome.cases for outcome in outcomes):>8,} {sum(bool(o.crash) for o in outcomes):>8}")
    return 0 if all(outcome.passed(args.runs) for outcome in outcomes) else 1


def _run(name: str, runs: int, crashes: Path) -> Outcome:
    from tests.fuzz.targets import named

    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="ravnest-fuzz-", dir=memory if memory.is_dir() else None) as folder:
        corpus, files = Path(folder) / "corpus", Path(folder) / "files"
        corpus.mkdir()
        files.mkdir()
        for number, seed in enumerate(named(name).seeds()):
            (corpus / f"seed-{number}").write_bytes(seed)
        limits = [f"-runs={runs}", f"-timeout={CASE_SECONDS}", f"-rss_limit_mb={MEMORY_MB}", "-max_len=8192"]
        options = [*limits, "-seed=1", "-print_final_stats=1", f"-artifact_prefix={crashes / name}-", str(corpus)]
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz", "--inside", name, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # libFuzzer ends its process abruptly; the files that it leaves are removed with this folder.
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(files)},
        )
    said = done.stdout
    growth = _number(r"stat::peak_rss_mb: +(\d+)", said) - _number(r"memory at the start: (\d+) MB", said)
    crash = ""
    if done.returncode != 0:
        kept = re.search(r"Test unit written to (\S+)", said)
        raised = re.findall(r"^ *((?:\w+\.)*\w*(?:Error|Exception|Warning)\b.*)$", said, re.M)
        reason = raised[-1] if raised else (said.strip().splitlines() or ["it said nothing"])[-1]
        crash = f"{kept.group(1) if kept else 'no input kept'}: {reason[:200]}"
    cases = _number(r"stat::number_of_executed_units: +(\d+)", said)
    return Outcome(name, cases, time.monotonic() - started, growth, crash)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def _fuzz(name: str, options: list[str]) -> None:
    """Runs one target in this process, until libFuzzer ends it."""
    import atheris

    # Modules that are imported in this block report to the fuzzer which branches an input took.
    with atheris.instrument_imports(include=["ravnest"], enable_loader_override=False):
        from tests.fuzz.mutations import mutate
        from tests.fuzz.targets import judge, named
    target = named(name)
    # One run before the measurement, because torch and the interpreter load much at their first use.
    for seed in target.seeds():
        judge(target, seed)

    def mutated(data: bytes, max_bytes: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.5:
            return bytes(atheris.Mutate(data, max_bytes))
        return mutate(data, random, target.is_json)[:max_bytes]

    def one(data: bytes) -> None:
        judge(target, data)

    print(f"memory at the start: {psutil.Process().memory_info().rss >> 20} MB", flush=True)
    atheris.Setup([sys.argv[0], *options], one, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())

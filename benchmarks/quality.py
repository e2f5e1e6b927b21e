"""Quality: how well asynchronous pipelines learn, by the loss after the same samples as in synchronous training.

Real stages of the engine, made by the real partition, train in one process and in virtual time
(benchmarks/quality_parts/virtual.py), since the loss is measured and not the speed. The number of microbatches in
flight is the one with which a plan begins, which is more than equal stages need, because real stages are not equal.
Synchronous training is one stage; more stages with one microbatch in flight equal it exactly.

Each way of training gets its best learning rate out of the same few: the two rates that are best with the first seed
are tried with all seeds, and the better mean counts. The loss is the mean over three seeds of the final loss on
held-out data (for digits, with a constant rate, the mean of the last four evaluations). Ways are 2, 4 and 8 stages with
every version policy and every correction. "recompute" must give the result of "stash", so one row of it is enough;
"double" needs as many microbatches per update as are in flight.

Each number of stages has a row with int8 on its links, encoded as in providers, and one with the optimizer's moments in
8 bits, which may be 0.01 above float32; so may "stash_8bit" with the default correction above "stash".

The targets are for the defaults: at most 0.02 above synchronous training with 4 stages, and 0.05 with 8. One row trains
in an embedded swarm with real processes and links, and must agree with its virtual twin.

The time to a fixed loss at 100 Mbit/s and 50 ms is the number of samples that Ravnest needs, with the links' delay in
virtual time, divided by the rate from `python -m benchmarks.pipeline` (`--rates FILE`, its JSON). For 1F1B the samples
are those of synchronous training with one update per eight microbatches, as in the measurement; with one update per
microbatch it would be no faster than single microbatches through all stages. The row also has the hypothetical time
with both that rate and one update per microbatch.
"""

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.pipeline_parts.swarms import MICROBATCHES
from benchmarks.quality_parts.rates import read_rates
from benchmarks.quality_parts.study import Found, rows, study
from benchmarks.quality_parts.tasks import TASKS
from benchmarks.quality_parts.times import times_to_loss
from benchmarks.quality_parts.trial import Trial, Way, job_of
from benchmarks.quality_parts.virtual import in_flight_of_plan
from benchmarks.report import Row, Target, finish, say
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.engine.corrections.correction import DEFAULT
from ravnest.monitor.metrics import read_metrics
from ravnest.settings import CORRECTIONS, VERSION_POLICIES

_STAGES: Final = (2, 4, 8)
_SEEDS: Final = 3
_AIMS: Final = {4: 0.02, 8: 0.05}
_LINK: Final = 2.2
"""Time of 1 MiB in one direction of a link of 100 Mbit/s and 50 ms, in forwards of 50 ms."""
_MAX_LINK: Final = 100.0
_CODED: Final = 0.01
"""Maximum increase of the loss by 8 bits on the links, in the moments or in stashed weights, in nats."""
_NOISE: Final = 0.03
"""Maximum difference between the swarm and its virtual twin, in nats; their cuts and schedules differ."""


def main() -> int:
    given = parse_arguments()
    ways = selected_ways(given)
    epochs = {name: given.epochs or (task.quick_epochs if given.quick else task.epochs) for name, task in TASKS.items()}
    found = study(ways, 2 if given.quick else _SEEDS, epochs, given.workers, rates=2 if given.quick else None)
    table: list[Row] = [*rows(found)]
    targets = _aims(found)
    twins = [way for way in found if way == Way(way.task, way.stages, "stash", DEFAULT) and 1 < way.stages <= 4]
    if given.swarm and twins:
        row, target = _swarm(found[max(twins, key=lambda way: way.stages)], epochs)
        table.append(row)
        targets.append(target)
    elif given.swarm:
        say("no row in a real swarm: the default with up to 4 stages is not selected")
    rates = None if given.rates is None else read_rates(given.rates, stages=4)
    more, faster = times_to_loss(found, rates)
    return finish("quality", given, [*table, *more], [*targets, *faster])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description="How well asynchronous pipelines learn."
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases, within a minute")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the result to this file")
    parser.add_argument("--record", action="store_true", help="also write the table to benchmarks/history/")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--task", choices=TASKS, action="append", help="run only this task; may be repeated")
    parser.add_argument(
        "--stages", type=int, choices=_STAGES, action="append", help="only this number of stages; may be repeated"
    )
    parser.add_argument(
        "--versions", choices=VERSION_POLICIES, action="append", help="run only this policy; may be repeated"
    )
    parser.add_argument(
        "--correction", choices=CORRECTIONS, action="append", help="run only this correction; may be repeated"
    )
    parser.add_argument(
        "--link",
        metavar="FORWARDS",
        type=float,
        action="append",
        help="run the default with links of this latency, and no rows with int8 and others; may be repeated",
    )
    parser.add_argument("--epochs", type=int, help="epochs of every run (default: those of the task)")
    parser.add_argument("--part", metavar="I/N", default="1/1", help="run only every N-th way, starting with the I-th")
    parser.add_argument("--rates", metavar="FILE", type=Path, help="output file of benchmarks.pipeline --json")
    parser.add_argument("--no-swarm", dest="swarm", action="store_false", help="leave out the row in a real swarm")
    given = parser.parse_args()
    if given.link is not None and not all(0 < link <= _MAX_LINK for link in given.link):
        parser.error(f"--link must be above 0 forwards and at most {_MAX_LINK:g}")
    given.task = given.task or (["digits"] if given.quick else list(TASKS))
    given.stages = given.stages or ([4] if given.quick else list(_STAGES))
    given.swarm = given.swarm and not given.quick
    return given


def selected_ways(given: argparse.Namespace) -> list[Way]:
    part, parts = map(int, given.part.split("/"))
    found: list[Way] = []
    for task in given.task:
        ways = [way for stages in given.stages for way in _of_stages(task, stages, given.quick)]
        ways = [way for way in ways if given.versions is None or way.versions in given.versions]
        ways = [way for way in ways if given.correction is None or way.correction in given.correction]
        # Every part needs the rows that the others are compared with.
        found += [Way(task), *ways[part - 1 :: parts]]
        defaults = [way for way in ways if way.versions == "stash" and way.correction == DEFAULT]
        if given.link and not defaults:
            say(f"no rows with --link: stash with {DEFAULT}, the default, is not selected")
        if given.link:
            found += [replace(way, link=link) for way in defaults for link in given.link]
        elif not given.quick and part == 1 and defaults:
            found.append(Way(task, accumulate=MICROBATCHES))
            found += [replace(way, link=_LINK) for way in defaults if way.stages == 4]
            found += [replace(way, codec="int8") for way in defaults]
            found += [replace(way, moments="8bit") for way in defaults]
    return found


def _of_stages(task: str, stages: int, quick: bool) -> list[Way]:
    stashed = [Way(task, stages, "stash", correction) for correction in CORRECTIONS]
    if quick:
        return stashed
    same = [Way(task, stages, "recompute", "none")] if stages == 4 else []
    others = [Way(task, stages, name, each) for name in ("stash_8bit", "in_place", "latest") for each in CORRECTIONS]
    flight = in_flight_of_plan(stages)
    double = [Way(task, stages, "double", correction, accumulate=flight) for correction in CORRECTIONS]
    return [*stashed, *same, *others, *double]


def _aims(found: dict[Way, Found]) -> list[Target]:
    targets = []
    for way, each in found.items():
        if way == Way(way.task, way.stages, "stash", DEFAULT) and way.stages in _AIMS:
            above = each.loss - found[Way(way.task)].loss
            targets.append(Target(f"{way.title}: above synchronous", above, _AIMS[way.stages], at_most=True))
        plain = found.get(replace(way, codec="float32"))
        whole = found.get(replace(way, moments="float32"))
        if way.moments != "float32" and whole is not None:
            targets.append(Target(f"{way.title}: above float32", each.loss - whole.loss, _CODED, at_most=True))
        if way.codec != "float32" and plain is not None:
            targets.append(Target(f"{way.title}: above float32", each.loss - plain.loss, _CODED, at_most=True))
        stashed = found.get(Way(way.task, way.stages, "stash", way.correction))
        if way.versions == "stash_8bit" and way.correction == DEFAULT and stashed is not None:
            targets.append(Target(f"{way.title}: above stash", each.loss - stashed.loss, _CODED, at_most=True))
        if way.versions == "recompute" and stashed is not None:
            apart = abs(each.loss - stashed.loss)
            targets.append(Target(f"{way.title}: off stash", apart, 1e-3, at_most=True))
    return targets


def _swarm(each: Found, epochs: dict[str, int]) -> tuple[Row, Target]:
    """Train one way in real processes with real links."""
    twin, task = each.way, TASKS[each.way.task]
    losses = []
    with tempfile.TemporaryDirectory() as folder, EmbeddedSwarm(twin.stages) as swarm:
        for seed in range(1, len(each.outcomes) + 1):
            run = Path(folder, str(seed))
            job = job_of(Trial(twin, each.rate, seed, epochs[twin.task]))
            swarm.train(job, providers=twin.stages, run=run, display=False)
            curve = [float(line["loss"]) for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "eval"]
            losses.append(statistics.mean(curve[-task.evaluations :]))
            say(f"{twin.title}, in a swarm, seed {seed}: {losses[-1]:.4f}")
    loss = statistics.mean(losses)
    title = f"{twin.title}, in a swarm"
    row = {
        "case": title,
        "loss": loss,
        "spread": statistics.stdev(losses),
        "rate": each.rate,
        "in_flight": twin.in_flight,
    }
    return row, Target(f"{title}: off its virtual twin", abs(loss - each.loss), _NOISE, at_most=True)


if __name__ == "__main__":
    sys.exit(main())

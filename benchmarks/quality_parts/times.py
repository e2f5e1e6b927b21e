"""Time to a fixed loss: the samples that the curves need to reach it, divided by the rates of pipelines on real links.

Samples of Ravnest are counted by virtual time: with fewer microbatches in flight, as at high learning rates, stages are
partly idle, and the rate measured with full pipelines would be too high.
"""

from typing import Final

from benchmarks.pipeline_parts.swarms import MICROBATCHES
from benchmarks.quality_parts.rates import Rates
from benchmarks.quality_parts.study import Found
from benchmarks.quality_parts.tasks import TASKS
from benchmarks.quality_parts.trial import Way
from benchmarks.report import Row, Target, say

_FASTER: Final = 2.0


def times_to_loss(found: dict[Way, Found], rates: Rates | None) -> tuple[list[Row], list[Target]]:
    """Rows and targets of the time to a fixed loss, for Ravnest and 1F1B."""
    table: list[Row] = []
    targets: list[Target] = []
    for way in found:
        flushing = Way(way.task, accumulate=MICROBATCHES)
        if not way.link or flushing not in found:
            continue
        task = TASKS[way.task]
        case = f"{task.title}, {way.stages} stages, 100 Mbit/s 50 ms: a loss of {task.loss_to_reach:g}"
        samples, synchronous, flushed = (
            found[each].samples_to(task.loss_to_reach) for each in (way, Way(way.task), flushing)
        )
        ours = found[way].full_samples_to(task.loss_to_reach)
        row: dict[str, object] = {
            "case": case,
            "our_samples": samples,
            "our_samples_by_time": ours,
            "synchronous_samples": synchronous,
            "samples_of_1f1b": flushed,
        }
        if rates is None:
            say(f"{case}: no time without --rates, the samples/s that benchmarks.pipeline measures")
        elif ours is None or synchronous is None or flushed is None:
            say(f"{case}: not reached")
        else:
            gained = rates.ours / rates.one_f_one_b
            row |= {
                "our_rate": rates.ours,
                "rate_of_1f1b": rates.one_f_one_b,
                "times_faster": gained * flushed / ours,
                "times_faster_if_1f1b_updated_each_time": gained * synchronous / ours,
            }
            targets.append(Target(f"{case}: times as fast as 1F1B", gained * flushed / ours, _FASTER))
        table.append(row)
    return table, targets

"""Final report of a run in a few lines: result, training, speed, and the path of the model."""

from collections.abc import Sequence
from typing import Final

from ravnest import units
from ravnest.monitor.summary import AveragingSummary, ClusterSummary, Summary
from ravnest.units import counted

_NAMED_CLUSTERS: Final = 4


def final_lines(summary: Summary) -> list[str]:
    """Lines shown at the end of a run, one fact per line, for every status."""
    return [headline(summary), *(f"{name}: {value}" for name, value in final_facts(summary))]


def headline(summary: Summary) -> str:
    """ "Finished in 12 s", or why the run did not finish."""
    if summary.status == "finished":
        return f"Finished in {units.duration(summary.seconds)}"
    reason = f": {summary.reason}" if summary.reason else ""
    return f"{summary.status.capitalize()} after {units.duration(summary.seconds)}{reason}"


def final_facts(summary: Summary) -> list[tuple[str, str]]:
    """The known results of a run, as (name, text)."""
    facts = []
    if summary.eval:
        facts.append(("evaluation", units.metrics(summary.eval)))
    if summary.samples:
        loss = "" if summary.train_loss is None else f", loss {units.metric(summary.train_loss)}"
        epochs = f"{summary.epochs:g} epoch{'' if summary.epochs == 1 else 's'}"
        updates = f"{units.count(summary.updates)} updates"
        facts.append(("training", f"{units.count(summary.samples)} samples, {epochs}, {updates}{loss}"))
        facts.append(("speed", _speed(summary)))
    if len(summary.clusters) > 1:
        facts.append(("clusters", _clusters(summary.clusters)))
        facts.append(("averaging", averaging_in_words(summary.averaging)))
    if summary.faults:
        facts.append(("faults", str(len(summary.faults))))
    if summary.model is not None:
        facts.append(("model", summary.model))
    return facts


def averaging_in_words(averaging: AveragingSummary) -> str:
    """Text such as "12 rounds of 3 rings, 0.4 s each, 35.1 MiB sent, 1 skipped"."""
    if not averaging.rounds and not averaging.skipped:
        return "no round yet"
    text = f"{counted(averaging.rounds, 'round')} of {counted(averaging.rings, 'ring')}"
    if averaging.seconds_mean is not None:
        text += f", {units.duration(averaging.seconds_mean)} each"
    text += f", {units.byte_size(averaging.bytes)} sent"
    return f"{text}, {units.count(averaging.skipped)} skipped" if averaging.skipped else text


def _clusters(clusters: Sequence[ClusterSummary]) -> str:
    """Each cluster, or only the range of rates if there are many."""
    if len(clusters) > _NAMED_CLUSTERS:
        rates = [cluster.samples_per_second for cluster in clusters]
        return f"{len(clusters)}, with {units.sample_rate(min(rates))} to {units.sample_rate(max(rates))} samples/s"
    each = [
        f"{units.count(cluster.samples)} samples at {units.sample_rate(cluster.samples_per_second)}/s in {cluster.id}"
        for cluster in clusters
    ]
    return ", ".join(each)


def _speed(summary: Summary) -> str:
    text = f"{units.sample_rate(summary.samples_per_second)} samples/s"
    predicted = summary.predicted_samples_per_second
    if predicted and summary.samples_per_second:
        off = summary.samples_per_second / predicted - 1
        text += f" (planned {units.sample_rate(predicted)}, {off:+.0%})"
    if summary.limits:
        text += f", limited by {summary.limits}"
    return text

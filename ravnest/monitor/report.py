"""The last words of a run: what it did, how well, how fast, and where the model is."""

from collections.abc import Sequence
from typing import Final

from ravnest import units
from ravnest.monitor.summary import Averaging, ClusterSummary, Summary
from ravnest.units import counted

_NAMED_CLUSTERS: Final = 4


def final_lines(summary: Summary) -> list[str]:
    """What is shown at the end of a run, whatever the end was; one fact a line."""
    return [headline(summary), *(f"{name}: {value}" for name, value in final_facts(summary))]


def headline(summary: Summary) -> str:
    """ "Finished in 12 s", or why it did not."""
    if summary.status == "finished":
        return f"Finished in {units.duration(summary.seconds)}"
    reason = f": {summary.reason}" if summary.reason else ""
    return f"{summary.status.capitalize()} after {units.duration(summary.seconds)}{reason}"


def final_facts(summary: Summary) -> list[tuple[str, str]]:
    """The named results of a run that are known."""
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


def averaging_in_words(averaging: Averaging) -> str:
    """Like "12 rounds of 3 rings, 0.4 s each, 35.1 MiB sent, 1 skipped"."""
    if not averaging.rounds and not averaging.skipped:
        return "no round yet"
    text = f"{counted(averaging.rounds, 'round')} of {counted(averaging.rings, 'ring')}"
    if averaging.seconds_mean is not None:
        text += f", {units.duration(averaging.seconds_mean)} each"
    text += f", {units.byte_size(averaging.bytes)} sent"
    return f"{text}, {units.count(averaging.skipped)} skipped" if averaging.skipped else text


def _clusters(clusters: Sequence[ClusterSummary]) -> str:
    """Each for itself, or of many the slowest and the fastest."""
    if len(clusters) > _NAMED_CLUSTERS:
        rates = [cluster.samples_per_second for cluster in clusters]
        return f"{len(clusters)}, of {units.sample_rate(min(rates))} to {units.sample_rate(max(rates))} samples/s"
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
    return text

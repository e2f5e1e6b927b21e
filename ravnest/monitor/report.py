"""The last words of a run: what it did, how well, how fast, and where the model is."""

from ravnest.monitor import words
from ravnest.monitor.summary import Summary


def final_lines(summary: Summary) -> list[str]:
    """What is shown at the end of a run, whatever the end was; one fact a line."""
    return [headline(summary), *(f"{name}: {value}" for name, value in final_facts(summary))]


def headline(summary: Summary) -> str:
    """ "Finished in 12 s", or why it did not."""
    if summary.status == "finished":
        return f"Finished in {words.duration(summary.seconds)}"
    reason = f": {summary.reason}" if summary.reason else ""
    return f"{summary.status.capitalize()} after {words.duration(summary.seconds)}{reason}"


def final_facts(summary: Summary) -> list[tuple[str, str]]:
    """The named results of a run that are known."""
    facts = []
    if summary.eval:
        facts.append(("evaluation", words.measures(summary.eval)))
    if summary.samples:
        loss = "" if summary.train_loss is None else f", loss {words.measure(summary.train_loss)}"
        epochs = f"{summary.epochs:g} epoch{'' if summary.epochs == 1 else 's'}"
        updates = f"{words.count(summary.updates)} updates"
        facts.append(("training", f"{words.count(summary.samples)} samples, {epochs}, {updates}{loss}"))
        facts.append(("speed", _speed(summary)))
    if summary.faults:
        facts.append(("faults", str(len(summary.faults))))
    if summary.model is not None:
        facts.append(("model", summary.model))
    return facts


def _speed(summary: Summary) -> str:
    text = f"{words.rate(summary.samples_per_second)} samples/s"
    predicted = summary.predicted_samples_per_second
    if predicted and summary.samples_per_second:
        off = summary.samples_per_second / predicted - 1
        text += f" (planned {words.rate(predicted)}, {off:+.0%})"
    return text

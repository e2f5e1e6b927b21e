"""Text form of a plan: the predicted rate, each cluster as a diagram and a table, the standbys, and the reasons."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ravnest import units
from ravnest.errors import printable
from ravnest.planner.cluster import StageCost
from ravnest.planner.plan import role_of
from ravnest.preview.diagram import milliseconds, picture, rate
from ravnest.preview.dry_run import DryRun
from ravnest.version_policy import DEFAULT_POLICY

SHOWN_STAGES: Final = 24
"""Maximum number of stages of the clusters that are shown in full; the other clusters are summarised."""
SHOWN_ROWS: Final = 30
"""Maximum number of rows of one cluster's table."""
SHOWN_NAMES: Final = 12
SHOWN_RINGS: Final = 6
SHOWN_OWNERS: Final = 6
SHOWN_LINKS: Final = 6
_NAME: Final = 16
_AS_FAST: Final = 0.995
"""If the rate over the whole run is this close to the steady rate, only the steady one is shown."""


def print_plan(dry: DryRun, console: Console) -> None:
    """Print the plan within the console's width."""
    for part in renderables(dry, console.width):
        console.print(part)


def renderables(dry: DryRun, width: int) -> Iterator[RenderableType]:
    """The parts of the output, from top to bottom."""
    yield _headline(dry)
    clusters = dry.clusters
    alone = [number for number, cluster in enumerate(clusters) if len(cluster.stages) == 1]
    together = [number for number, cluster in enumerate(clusters) if len(cluster.stages) > 1]
    shown = 0
    for place, number in enumerate(together):
        if shown and shown + len(clusters[number].stages) > SHOWN_STAGES:
            yield Text("")
            yield _the_others(dry, together[place:])
            break
        shown += len(clusters[number].stages)
        yield Text("")
        yield _cluster_line(dry, number)
        yield Text("")
        yield Text(words_of(picture(dry, number, width)), no_wrap=True, overflow="crop")
        yield stage_table(dry, number)
    if alone:
        yield Text("")
        yield Text("machines that hold the whole model, each a cluster of its own", style="bold")
        yield Text("")
        yield single_table(dry, alone[:SHOWN_ROWS])
        if len(alone) > SHOWN_ROWS:
            yield _the_others(dry, alone[SHOWN_ROWS:])
    for line in (*_below(dry), *_reasons(dry)):
        # Continuation lines are indented further.
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        yield Text(textwrap.fill(line, max(20, width), subsequent_indent=indent))


def single_table(dry: DryRun, numbers: Sequence[int]) -> Table:
    """One row for each of these clusters, which have one stage each."""
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("\ncluster", justify="right", no_wrap=True)
    table.add_column("\nprovider", overflow="fold")
    for title in ("\nsamples/s", "memory\nneeds/has", "compute\nms", "line\nms"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("\nlimit", no_wrap=True)
    for number in numbers:
        stage = dry.clusters[number].stages[0]
        rate_shown = units.sample_rate(dry.plan.rates[number])
        table.add_row(str(number + 1), Text(words_of(stage.provider)), rate_shown, *_figures(dry, stage))
    return table


def stage_table(dry: DryRun, number: int) -> Table:
    """One row for each stage of a cluster."""
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    longest = max(cell_len(name) for name in dry.clusters[number].providers)
    table.add_column("\nprovider", overflow="fold", min_width=min(_NAME, longest))
    table.add_column("\nlayers", overflow="fold")
    table.add_column("\nparams", justify="right", no_wrap=True)
    for title in ("memory\nneeds/has", "compute\nms", "line\nms"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("\nlimit", no_wrap=True)
    cluster = dry.clusters[number]
    slowest = max(cluster.stages, key=lambda stage: stage.seconds)
    for k, stage in enumerate(cluster.stages):
        if len(cluster.stages) > SHOWN_ROWS and k == SHOWN_ROWS - 5:
            table.add_row("…", Text(f"{len(cluster.stages) - SHOWN_ROWS + 1} more"))
        if len(cluster.stages) > SHOWN_ROWS and SHOWN_ROWS - 5 <= k < len(cluster.stages) - 4:
            continue
        part = dry.parts.between(stage.start, stage.end)
        table.add_row(
            role_of(k, len(cluster.stages)),
            Text(words_of(stage.provider)),
            Text(words_of(part.title)),
            units.short_count(part.parameters),
            *_figures(dry, stage),
            style="bold" if stage is slowest else "",
        )
    return table


def _figures(dry: DryRun, stage: StageCost) -> tuple[str, str, str, str]:
    return (
        f"{_size(stage.memory_bytes)}/{_size(dry.providers[stage.provider].memory_bytes)}",
        milliseconds(stage.compute_seconds),
        milliseconds(max(stage.up_seconds, stage.down_seconds, stage.line_seconds)),
        limit_word(stage),
    )


def limit_word(stage: StageCost) -> str:
    """The busiest resource of a stage, in one word."""
    named = {
        "compute": stage.compute_seconds,
        "upload": stage.up_seconds,
        "download": stage.down_seconds,
        "link": stage.line_seconds,
    }
    return max(named, key=lambda name: named[name])


def words_of(text: str) -> str:
    """Names with their unprintable characters replaced; line ends are kept."""
    return "\n".join(printable(line) for line in text.split("\n"))


def _headline(dry: DryRun) -> Text:
    plan = dry.plan
    stages = [len(cluster.stages) for cluster in plan.clusters]
    what = f"{units.counted(len(stages), 'cluster')} of {_stages(stages)}"
    text = Text.assemble(
        (f"{words_of(dry.title)}: {units.sample_rate(plan.steady_samples_per_second)} samples/s predicted", "bold"),
        f" with {what}, of {units.counted(len(dry.providers), 'machine')}",
    )
    parameters, size = units.short_count(dry.parts.count), units.byte_size(float(dry.model.parameter_bytes[-1]))
    text.append(f"\n{parameters} parameters, {size}; microbatches of {dry.model.samples} samples")
    if plan.slowed < _AS_FAST:
        over = units.sample_rate(plan.predicted_samples_per_second)
        text.append(
            f"\n{over} samples/s over the whole run: fewer microbatches are in flight while the learning rate is high"
        )
    if dry.goal.versions != DEFAULT_POLICY:
        text.append(f"\n{plan.versions_reason}")
    return text


def _cluster_line(dry: DryRun, number: int) -> Text:
    cluster = dry.clusters[number]
    providers = [dry.providers[name] for name in cluster.providers]
    speeds = [provider.compute_speed for provider in providers]
    text = Text.assemble(
        (f"cluster {number + 1}: {units.sample_rate(dry.plan.rates[number])} samples/s", "bold"),
        f", {units.counted(cluster.in_flight, 'microbatch', 'microbatches')} in flight, staleness up to "
        f"{dry.staleness(cluster)}",
    )
    text.append(f"\nlimited by {words_of(_limit(dry, number))}\nmachines {_range(speeds)} times as fast as this one")
    rates = [line.bytes_per_second for k in range(len(providers)) for line in dry.line_before(cluster, k) or ()]
    if rates:
        slow, fast = rate(min(rates)), rate(max(rates))
        text.append(f", lines of {slow}" if slow == fast else f", lines of {slow} to {fast}")
    return text


def _limit(dry: DryRun, number: int) -> str:
    cluster = dry.clusters[number]
    if dry.plan.rates[number] > 0.999 * cluster.samples_per_second:
        return cluster.limit
    alone = units.sample_rate(cluster.samples_per_second)
    return f"{dry.plan.limit}; alone it would reach {alone} samples/s, limited by {cluster.limit}"


def _the_others(dry: DryRun, numbers: Sequence[int]) -> Text:
    stages = [len(dry.clusters[number].stages) for number in numbers]
    return Text(
        f"… and {units.counted(len(numbers), 'cluster')} more, of {_stages(stages)} and "
        f"{_range([dry.plan.rates[number] for number in numbers])} samples/s each; --json shows all"
    )


def _below(dry: DryRun) -> Iterator[str]:
    plan = dry.plan
    yield ""
    if len(plan.clusters) > 1:
        yield f"averaging: in {units.counted(len(dry.rings), 'ring')}; {plan.average_reason}"
        yield from _rings(dry)
    yield from _coded_links(dry)
    if plan.limit and dry.explanation is None:
        yield f"together they are limited by {words_of(plan.limit)}"
    if dry.state is not None:
        yield words_of(f"state: {'; '.join(dry.state.sentences())}")
    yield f"standbys: {_names(plan.standbys) if plan.standbys else 'none'}"


def _reasons(dry: DryRun) -> Iterator[str]:
    """The reasons for the plan, without sentences that the diagrams already show."""
    if dry.explanation is None:
        return
    yield ""
    for sentence in dry.explanation.sentences:
        if sentence not in dry.explanation.clusters:
            yield f"- {words_of(sentence)}"


def _rings(dry: DryRun) -> Iterator[str]:
    for ring in dry.rings[:SHOWN_RINGS]:
        part = dry.parts.between(ring.start, ring.end)
        owners = " > ".join(words_of(name) for name in ring.owners[:SHOWN_OWNERS])
        more = len(ring.owners) - SHOWN_OWNERS
        owners += f" > … {more:,} more" if more > 0 else ""
        yield f"  {words_of(part.title)}: {owners}, slowest line {rate(ring.slowest_bytes_per_second)}"
    if len(dry.rings) > SHOWN_RINGS:
        yield f"  … and {len(dry.rings) - SHOWN_RINGS:,} more"


def _coded_links(dry: DryRun) -> Iterator[str]:
    """Links with a lossy codec, and why."""
    coded = [
        f"{words_of(cluster.stages[before].provider)} to {words_of(stage.provider)}"
        f"{' (looked-up rows)' if before > number else ''} in {stage.codec_reason}"
        for cluster in dry.clusters
        for number, stage in enumerate(cluster.stages)
        if (before := cluster.before(number)) is not None and stage.codec != "float32"
    ]
    yield from coded[:SHOWN_LINKS]
    if len(coded) > SHOWN_LINKS:
        yield f"… and {units.counted(len(coded) - SHOWN_LINKS, 'link')} more with a codec; --json shows all"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(words_of(name) for name in names[:SHOWN_NAMES])
    return shown if len(names) <= SHOWN_NAMES else f"{shown} and {len(names) - SHOWN_NAMES:,} more"


def _size(value_bytes: float) -> str:
    """1234567890 as "1.15G", in powers of 1024."""
    return units.byte_size(value_bytes).replace(" ", "").removesuffix("iB").removesuffix("B")


def _stages(counts: Sequence[int]) -> str:
    return f"{_range(counts)} {'stage' if max(counts) == 1 else 'stages'}"


def _range(values: Sequence[float]) -> str:
    """ "3", or "2 to 5", with three significant digits."""
    low, high = (f"{v:,.0f}" if v >= 1000 or v == math.floor(v) else f"{v:.3g}" for v in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"

"""Report of a run as one HTML page: its result, figures per stage, and a chart per cluster. No scripts, no network."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final

from ravnest import units
from ravnest.errors import printable
from ravnest.monitor.gantt import gantt, legend
from ravnest.monitor.report import final_facts, headline
from ravnest.monitor.steady import StageFigures, Stretch, last_of, steady_stretch
from ravnest.monitor.summary import StageSummary, Summary
from ravnest.monitor.trace import Trace, TraceStage
from ravnest.units import counted

SHOWN_MICROBATCHES: Final = 40
SHOWN_CLUSTERS: Final = 8
SHOWN_STAGES: Final = 64
"""Number of stages per cluster that the chart shows."""


def report_page(name: str, summary: Summary, trace: Trace | None) -> str:
    """The page for the run of this name."""
    facts = "".join(
        f"<tr><th>{escape(printable(fact))}</th><td>{escape(printable(value))}</td></tr>"
        for fact, value in final_facts(summary)
    )
    title = escape(printable(name))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title} - Ravnest</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{_STYLE}</style></head>
<body>
<h1>{title}</h1>
<p>{escape(printable(headline(summary)))}</p>
<table class="facts">{facts}</table>
<h2>Pipelines</h2>
{_pipelines(summary, trace)}
</body></html>
"""


def _pipelines(summary: Summary, trace: Trace | None) -> str:
    session = trace.sessions[-1] if trace is not None and trace.sessions else ()
    if not any(stage.spans for stage in session):
        why = "it ran with <code>pipeline.trace=0</code>, or it ended before the first report of a stage arrived"
        return f'<p class="none">This run has no trace: {why}.</p>{_table(summary, {})}'
    clusters: dict[int, list[TraceStage]] = {}
    for stage in session:
        clusters.setdefault(stage.cluster, []).append(stage)
    found = {cluster: steady_stretch(stages) for cluster, stages in clusters.items()}
    parts = [_table(summary, found)]
    for cluster, stages in list(clusters.items())[:SHOWN_CLUSTERS]:
        parts.append(_picture(cluster, stages, found[cluster], len(clusters)))
    if len(clusters) > SHOWN_CLUSTERS:
        parts.append(f"<p>{len(clusters) - SHOWN_CLUSTERS} more clusters are in trace.json.</p>")
    assert trace is not None
    before = len(trace.sessions) - 1
    sessions = f" It also has {counted(before, 'session')} before the run was resumed." if before else ""
    parts.append(
        '<p class="dim">The whole trace is in <code>trace.json</code> next to this page: open it in Perfetto '
        f"(ui.perfetto.dev) or chrome://tracing.{sessions} The clocks of the machines are aligned by the times at "
        "which frames were sent and received; the error is at most half of the shortest round trip.</p>"
    )
    return "\n".join(parts)


def _picture(cluster: int, stages: Sequence[TraceStage], stretch: Stretch | None, clusters: int) -> str:
    title = f"<h3>Cluster {cluster}</h3>" if clusters > 1 else ""
    if stretch is None:
        return f'{title}<p class="none">No microbatch of this cluster was traced.</p>'
    began, ended = last_of(stretch, stages, SHOWN_MICROBATCHES)
    shown = Stretch(stretch.began, stretch.ended, stretch.microbatches, stretch.steady, stretch.stages[:SHOWN_STAGES])
    what = "in steady state" if stretch.steady else "the last part of the trace: too short for a steady state"
    length = units.duration(ended - began) if ended - began >= 1 else f"{1000 * (ended - began):.3g} ms"
    count = min(len(stretch.microbatches), SHOWN_MICROBATCHES)
    said = f"{length}, {counted(count, 'microbatch', 'microbatches')} started, {what}"
    left_out = len(stretch.stages) - len(shown.stages)
    more = f"<p>{left_out} more stages are in trace.json.</p>" if left_out else ""
    return (
        f'{title}<p>{said}</p>{legend(shown, began, ended)}<div class="chart">{gantt(shown, began, ended)}</div>{more}'
    )


def _table(summary: Summary, stretches: Mapping[int, Stretch | None]) -> str:
    if not any(cluster.stages for cluster in summary.clusters):
        return ""
    rows = []
    for cluster in summary.clusters:
        stretch = stretches.get(cluster.id)
        figures = {} if stretch is None else {each.stage.stage: each for each in stretch.stages}
        for stage in cluster.stages:
            steady = stretch is not None and stretch.steady
            rows.append(_row(cluster.id, stage, figures.get(stage.stage), steady))
    head = "".join(f"<th>{escape(each)}</th>" for each in _HEADS)
    note = (
        '<p class="dim">Busy is the share of time in which a stage computed, once its pipeline was full: over the '
        "stretch in the picture if the trace has a steady state, otherwise over the whole training. The time that is "
        "neither busy nor waiting went into passing values between threads.</p>"
    )
    return f'<table class="stages"><tr>{head}</tr>{"".join(rows)}</table>{note}'


_HEADS: Final = (
    *("cluster", "stage", "provider", "busy", "forward", "backward", "update"),
    *("waits for any input", "waits for a gradient", "sent", "received", "staleness"),
)


def _row(cluster: int, stage: StageSummary, figures: StageFigures | None, steady: bool) -> str:
    mean = {} if figures is None else dict(figures.mean_seconds)
    if "weights" in mean:
        mean["backward"] = mean.get("backward", 0.0) + mean["weights"]
    waits = figures.waits if figures is not None and steady else None
    busy = figures.busy_fraction if figures is not None and steady else stage.busy_fraction
    cells: Iterable[str] = (
        str(cluster),
        f"{stage.stage} {stage.role}",
        stage.provider,
        f"{busy:.1%}",
        *(f"{1000 * mean[kind]:.3g} ms" if kind in mean else "" for kind in ("forward", "backward", "update")),
        "" if waits is None else f"{waits.get('nothing ready', 0.0):.1%}",
        "" if waits is None else f"{waits.get('limit', 0.0):.1%}",
        units.byte_size(stage.bytes_sent),
        units.byte_size(stage.bytes_received),
        f"{stage.staleness.mean:.1f}, at most {stage.staleness.max}",
    )
    return f"<tr>{''.join(f'<td>{escape(printable(cell))}</td>' for cell in cells)}</tr>"


_STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 1300px; margin: 2em auto;
       padding: 0 1.5em; }
h1 { font-size: 1.6em; margin-bottom: 0; } h2 { margin-top: 1.6em; }
table { border-collapse: collapse; } th { text-align: left; font-weight: 600; } .facts th { padding-right: 1.5em; }
.stages { font-size: 14px; display: block; overflow-x: auto; }
.stages th, .stages td { padding: .25em .8em .25em 0; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
.stages td:nth-child(n+4) { font-variant-numeric: tabular-nums; }
.dim { color: #666; } .none { background: #f5f5f5; padding: .8em 1em; }
.chart { overflow-x: auto; } .legend { font-size: 13px; } .key { margin-right: 1.1em; white-space: nowrap; }
.key svg { vertical-align: -1px; }
.gantt { font: 12px system-ui, sans-serif; } .gantt .name { font-weight: 600; } .gantt .dim { fill: #666; }
.gantt .busy { text-anchor: end; fill: #1b1b1b; } .gantt .tick { text-anchor: middle; fill: #666; font-size: 11px; }
.gantt .grid { stroke: #e4e4e4; } .gantt .ground { fill: #fff; stroke: #e4e4e4; }
.gantt .light, .gantt .dark { font-size: 10px; text-anchor: middle; pointer-events: none; }
.gantt .light { fill: #fff; } .gantt .dark { fill: #1b1b1b; }
"""

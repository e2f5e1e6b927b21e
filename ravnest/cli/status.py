"""`ravnest status RUN`: how a run stands, read from its run directory while it goes on or afterwards."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from ravnest.monitor import words
from ravnest.monitor.events import Event, read_events
from ravnest.monitor.run_directory import RunPaths, existing_run, lock_holder
from ravnest.monitor.summary import StageSummary, Summary

SHOWN_EVENTS = 8


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the command to what `ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "status", help="show how a run stands", description="Show how a run stands, from its run directory."
    )
    parser.add_argument("path", metavar="RUN", type=Path, help="the run directory")
    parser.add_argument("--json", action="store_true", help="print it as JSON, for other programs")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints the state of the run; RunError when there is none at that path."""
    paths = existing_run(args.path)
    summary = Summary.read(paths.summary_path) if paths.summary_path.exists() else None
    process = lock_holder(paths)
    events = read_events(paths.events_path)
    if args.json:
        print(json.dumps(_as_json(paths, summary, process, events), indent=2))
    else:
        _print(paths, summary, process, events, sys.stdout)
    return 0


def _state(summary: Summary | None, process: int | None) -> tuple[str, str]:
    """The status of the run in one word, and why."""
    if summary is None:
        return ("starting", "no summary yet") if process is not None else ("failed", "it ended before it trained")
    if summary.status == "running" and process is None:
        return "interrupted", "its process is gone; continue it with --resume"
    return summary.status, summary.reason


def _as_json(paths: RunPaths, summary: Summary | None, process: int | None, events: list[Event]) -> dict[str, Any]:
    status, reason = _state(summary, process)
    record = {} if summary is None else summary.to_json()
    return {
        "run": str(paths.path),
        "process": process,
        **record,
        "status": status,
        "reason": reason,
        "events": events[-SHOWN_EVENTS:],
    }


def _print(paths: RunPaths, summary: Summary | None, process: int | None, events: list[Event], stream: TextIO) -> None:
    from rich.console import Console
    from rich.text import Text

    from ravnest.monitor.report import final_facts

    console = Console(file=stream, highlight=False)
    status, reason = _state(summary, process)
    style = {"finished": "green", "running": "cyan", "starting": "cyan", "stopped": "yellow"}.get(status, "red")
    line = Text.assemble((str(paths.path), "bold"), "  ", (status, f"bold {style}"))
    if reason and status != "finished":
        line.append(f"  {words.printable(reason)}")
    if process:
        line.append(f"  (process {process})", style="dim")
    console.print(line, soft_wrap=True)
    if summary is not None:
        for name, value in final_facts(summary):
            console.print(Text.assemble((f"{name:<14}", "dim"), words.printable(value)), soft_wrap=True)
        ledger = summary.ledger
        if ledger.fed:
            text = f"fed {words.count(ledger.fed)}, completed {words.count(ledger.completed)}, replayed "
            text += f"{words.count(ledger.replayed)}, lost {words.count(ledger.lost)}"
            console.print(Text.assemble((f"{'microbatches':<14}", "dim"), text))
        if any(cluster.stages for cluster in summary.clusters):
            console.print()
            console.print(_stages(summary))
    if events:
        console.print()
        for event in events[-SHOWN_EVENTS:]:
            console.print(_event(event), soft_wrap=True)


def _stages(summary: Summary) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", padding=(0, 1), pad_edge=False)
    for title in ("cluster", "stage", "provider", "device"):
        table.add_column(title, no_wrap=True)
    for title in ("params", "busy", "staleness", "peak memory"):
        table.add_column(title, no_wrap=True, justify="right")
    table.add_column("link to the next", no_wrap=True)
    for cluster in summary.clusters:
        following = {stage.stage - 1: stage.provider for stage in cluster.stages}
        for stage in cluster.stages:
            cells = (
                str(cluster.id),
                f"{stage.stage} {stage.role}",
                stage.provider,
                stage.device,
                words.short_count(stage.parameters),
                f"{stage.busy_fraction:.0%}",
                f"{stage.staleness.mean:.1f} max {stage.staleness.max}",
                words.size(stage.peak_memory_bytes),
                _route(stage, following.get(stage.stage, "")),
            )
            table.add_row(*(Text(words.printable(cell)) for cell in cells))
    return table


def _route(stage: StageSummary, following: str) -> str:
    """How the link to the next stage runs."""
    for link in stage.links:
        if link.to == following:
            again = f", {words.count(link.connections)} connections" if link.connections > 1 else ""
            return (link.route or "down") + again
    return ""


def _event(event: Event) -> Any:
    from rich.text import Text

    at = event.get("at")
    when = time.strftime("%H:%M:%S", time.localtime(at)) if isinstance(at, int | float) else "?"
    kind, reason = words.printable(str(event.get("kind", ""))), words.printable(str(event.get("reason", "")))
    return Text.assemble((when, "dim"), f"  {kind:<18} ", (reason, "dim"))

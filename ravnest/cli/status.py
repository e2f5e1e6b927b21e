"""`ravnest status RUN`: state of a run, read from its run directory during the run or afterwards."""

import argparse
import itertools
import json
import sys
import time
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ravnest import units
from ravnest.cli.arguments import Subparsers
from ravnest.errors import printable
from ravnest.monitor.events import Event, read_events
from ravnest.monitor.run_directory import RunPaths, existing_run, lock_holder
from ravnest.monitor.saved_state import saved_states_as_text
from ravnest.monitor.summary import Summary

if TYPE_CHECKING:
    from ravnest.coordinator.access.swarm_store import KnownMember

SHOWN_EVENTS = 8


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command and its arguments."""
    parser = subparsers.add_parser(
        "status",
        help="show the state of a run",
        description="Show the state of a run, from its run directory: progress, stages, links, members, events.",
    )
    parser.add_argument("path", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--json", action="store_true", help="print the state as JSON, for other programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the state of the run; raises RunError if there is no run at that path."""
    paths = existing_run(args.path)
    summary = Summary.read(paths.summary_path) if paths.summary_path.exists() else None
    process = lock_holder(paths)
    events = read_events(paths.events_path)
    members = _members(paths)
    if args.json:
        record = as_json(paths, summary, process, events)
        if members is not None:
            record["members"] = [asdict(member) | {"connected": _connected(member, process)} for member in members]
        print(json.dumps(record, indent=2))
    else:
        print_state(paths, summary, process, members or [], events, sys.stdout)
    return 0


def _members(paths: RunPaths) -> "list[KnownMember] | None":
    """Members of a served run, past and present; None for any other run."""
    if not paths.store_path.exists():
        return None
    from ravnest.coordinator.access.swarm_store import SwarmState

    with closing(SwarmState(paths.store_path)) as state:
        return state.members()


def _connected(member: "KnownMember", process: int | None) -> bool:
    # A killed coordinator could not record that its members disconnected.
    return member.connected and process is not None


def _state(summary: Summary | None, process: int | None) -> tuple[str, str]:
    """Status of the run in one word, and its reason."""
    if summary is None:
        return ("starting", "no summary yet") if process is not None else ("failed", "it ended before training started")
    if summary.status == "running" and process is None:
        return "interrupted", "its process is gone; continue the run with --resume"
    return summary.status, summary.reason


def as_json(paths: RunPaths, summary: Summary | None, process: int | None, events: list[Event]) -> dict[str, Any]:
    """State of a run as `ravnest status --json` prints it; `process` is the coordinator's, None if it has ended."""
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


def print_state(
    paths: RunPaths,
    summary: Summary | None,
    process: int | None,
    members: "list[KnownMember]",
    events: list[Event],
    stream: TextIO,
) -> None:
    """Writes the state of a run as `ravnest status` prints it."""
    from rich.console import Console
    from rich.text import Text

    from ravnest.monitor.report import final_facts

    console = Console(file=stream, highlight=False)
    status, reason = _state(summary, process)
    style = {"finished": "green", "running": "cyan", "starting": "cyan", "stopped": "yellow"}.get(status, "red")
    line = Text.assemble((str(paths.path), "bold"), "  ", (status, f"bold {style}"))
    if reason and status != "finished":
        line.append(f"  {printable(reason)}")
    if process:
        line.append(f"  (process {process})", style="dim")
    console.print(line, soft_wrap=True)
    if summary is not None and summary.standstill and status == "running":
        console.print(Text(printable(summary.standstill), style="yellow"), soft_wrap=True)
    if summary is not None:
        for name, value in final_facts(summary):
            console.print(Text.assemble((f"{name:<14}", "dim"), printable(value)), soft_wrap=True)
        for name, kinds in (("rounds", ("rings", "rounds_corrected")), ("last round", ("round", "round_skipped"))):
            event = next((event for event in reversed(events) if event.get("kind") in kinds), None)
            if event is not None:
                told = printable(str(event.get("reason", "")))
                console.print(Text.assemble((f"{name:<14}", "dim"), told), soft_wrap=True)
        if saved := saved_states_as_text(summary, _seen_at(paths, process)):
            console.print(Text.assemble((f"{'saved':<14}", "dim"), saved), soft_wrap=True)
        for flying in _flights(summary):
            console.print(Text.assemble((f"{'in flight':<14}", "dim"), printable(flying)), soft_wrap=True)
        if summary.state.told:
            console.print(Text.assemble((f"{'state':<14}", "dim"), printable(summary.state.told)), soft_wrap=True)
        ledger = summary.ledger
        if ledger.fed:
            text = f"fed {units.count(ledger.fed)}, completed {units.count(ledger.completed)}, replayed "
            text += f"{units.count(ledger.replayed)}, lost {units.count(ledger.lost)}"
            console.print(Text.assemble((f"{'microbatches':<14}", "dim"), text))
        if any(cluster.stages for cluster in summary.clusters):
            console.print()
            console.print(_stages(summary))
            for link in _links(summary):
                console.print(Text.assemble((f"{'link':<14}", "dim"), printable(link)), soft_wrap=True)
    if members:
        console.print()
        # Users copy the addresses: a row wider than the terminal is better than a truncated one.
        console.print(_member_table(members, process), soft_wrap=True)
    if events:
        console.print()
        for event in events[-SHOWN_EVENTS:]:
            console.print(_event(event), soft_wrap=True)


def _seen_at(paths: RunPaths, process: int | None) -> float:
    """The time of the state that is shown: now, or when the summary of a run whose process is gone was written."""
    with suppress(OSError):
        if process is None:
            return paths.summary_path.stat().st_mtime
    return time.time()


def _member_table(members: "list[KnownMember]", process: int | None) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", padding=(0, 1), pad_edge=False)
    for title in ("member", "now", "device", "memory", "address", "last stage"):
        table.add_column(title, no_wrap=True)
    for member in members:
        ago = max(0.0, time.time() - member.seen_at)
        now = "connected" if _connected(member, process) else f"last seen {units.duration(ago)} ago"
        cells = (
            member.node_id,
            "removed" if member.kicked else now,
            member.device,
            units.byte_size(member.memory_bytes),
            member.address,
            "" if member.stage is None else str(member.stage),
        )
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _stages(summary: Summary) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", padding=(0, 1), pad_edge=False)
    for title in ("cluster", "stage", "provider", "device"):
        table.add_column(title, no_wrap=True)
    for title in ("params", "busy", "staleness", "peak memory"):
        table.add_column(title, no_wrap=True, justify="right")
    for cluster in summary.clusters:
        for stage in cluster.stages:
            cells = (
                str(cluster.id),
                f"{stage.stage} {stage.role}",
                stage.provider,
                stage.device,
                units.short_count(stage.parameters),
                f"{stage.busy_fraction:.0%}",
                f"{stage.staleness.mean:.1f} max {stage.staleness.max}",
                units.byte_size(stage.peak_memory_bytes),
            )
            table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _flights(summary: Summary) -> list[str]:
    """In-flight limit of each cluster with several stages, and its reason."""
    several = len(summary.clusters) > 1
    return [
        f"{f'cluster {cluster.id}: ' if several else ''}{cluster.in_flight}: {cluster.in_flight_reason}"
        for cluster in summary.clusters
        if cluster.in_flight is not None and len(cluster.stages) > 1
    ]


def _links(summary: Summary) -> list[str]:
    """State of the link from each stage to the next, and from a leaf that looks rows up to the root."""
    lines = []
    for cluster in summary.clusters:
        pairs = list(itertools.pairwise(cluster.stages))
        if pairs and len(cluster.stages[-1].links) > 1:
            pairs.append((cluster.stages[-1], cluster.stages[0]))
        for number, (stage, following) in enumerate(pairs):
            # The link to the stage before comes first; with two stages, both links may lead to the same one.
            link = next((link for link in reversed(stage.links) if link.to == following.provider), None)
            if link is None:
                continue
            again = f", connected {units.count(link.connections)} times" if link.connections > 1 else ""
            delay = "" if link.delay_seconds is None else f", {1e3 * link.delay_seconds:.3g} ms round trip"
            rows = " (looked-up rows)" if number == len(cluster.stages) - 1 else ""
            coded = "" if link.codec == "float32" else f", {link.codec}"
            lines.append(f"{stage.provider} to {link.to}{rows}: {link.route or 'down'}{coded}{delay}{again}")
    return lines


def _event(event: Event) -> Any:
    from rich.text import Text

    at, when = event.get("at"), "?"
    # An event of a damaged file may have a time out of range.
    with suppress(OverflowError, OSError, ValueError):
        if isinstance(at, int | float):
            when = time.strftime("%H:%M:%S", time.localtime(at))
    kind, reason = printable(str(event.get("kind", ""))), printable(str(event.get("reason", "")))
    return Text.assemble((when, "dim"), f"  {kind:<18} ", (reason, "dim"))

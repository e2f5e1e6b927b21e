"""Common part of all benchmarks: arguments, the table on screen, the JSON file, and the exit code.

A benchmark measures rows and compares some of their figures with targets. `finish` shows both, writes them to the
requested files, and returns exit code 1 if a target is missed.
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
HISTORY = Path(__file__).resolve().parent / "history"
_FILE_COLUMNS = 140

Row = Mapping[str, object]
"""One measured case: its name under "case", then figures by name. Rows may have different figures."""


@dataclass(frozen=True, slots=True)
class Target:
    """Target for one figure: `value` must be at least `target`, or at most, with `at_most`."""

    name: str
    value: float
    target: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.value <= self.target if self.at_most else self.value >= self.target

    def to_json(self) -> dict[str, object]:
        limit = "at most" if self.at_most else "at least"
        return {"name": f"{self.name}, {limit}", "value": self.value, "target": self.target, "met": self.met}


def arguments(
    name: str, description: str, parts: Sequence[str] = (), options: Mapping[str, str] | None = None
) -> argparse.Namespace:
    """The command line of a benchmark: `quick`, `json` and `record`, and `only`, a list, if it has parts. `options` are
    further paths that it may get, each with its help."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="fewer cases, within a minute")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the result to this file")
    parser.add_argument("--record", action="store_true", help="also write the table to benchmarks/history/")
    if parts:
        parser.add_argument("--only", choices=parts, action="append", help="run only this part; may be repeated")
    for option, text in (options or {}).items():
        parser.add_argument(f"--{option}", metavar="PATH", type=Path, help=text)
    given = parser.parse_args()
    if parts:
        given.only = given.only or list(parts)
    return given


def say(text: str) -> None:
    """Print progress to standard error; standard output has the result alone."""
    print(text, file=sys.stderr, flush=True)


def finish(name: str, given: argparse.Namespace, rows: Sequence[Row], targets: Sequence[Target]) -> int:
    """Show and write the result; returns the exit code."""
    result = {
        "benchmark": name,
        "commit": commit(),
        "machine": machine(),
        "rows": [dict(row) for row in rows],
        "targets": [target.to_json() for target in targets],
    }
    _show(result)
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    if given.record:
        _record(result)
    return 0 if all(target.met for target in targets) else 1


def commit() -> str:
    """The commit that is checked out, with "+" if files differ from it."""
    try:
        git = ["git", "-C", str(ROOT)]
        found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip() + ("+" if changed.stdout.strip() else "")


def machine() -> dict[str, object]:
    """Description of the machine."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _show(result: Mapping[str, Any]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_COLUMNS)
    for title, rows in (("benchmark", result["rows"]), ("targets", result["targets"])):
        if not rows:
            continue
        names = _columns(rows)
        table = Table(title=result["benchmark"] if title == "benchmark" else title)
        for name in names:
            table.add_column(name.replace("_", " "), justify="left" if name in ("case", "name") else "right")
        for row in rows:
            table.add_row(*(_text(row.get(name)) for name in names))
        console.print(table)
    console.print(_described(result), highlight=False)


def _record(result: Mapping[str, Any]) -> None:
    """Write the result as a new file of the history; an existing file is never changed."""
    lines = [f"# {result['benchmark']}, {time.strftime('%Y-%m-%d')}\n", f"{_described(result)}\n"]
    for rows in (result["rows"], result["targets"]):
        if rows:
            names = _columns(rows)
            lines.append("| " + " | ".join(name.replace("_", " ") for name in names) + " |")
            lines.append("|" + "|".join("---" if name in ("case", "name") else "---:" for name in names) + "|")
            lines += ["| " + " | ".join(_text(row.get(name)) for name in names) + " |" for row in rows]
            lines.append("")
    day = time.strftime("%Y-%m-%d")
    names_of_day = (f"{day}-{number:02d}-{result['benchmark']}.md" for number in itertools.count(1))
    path = next(HISTORY / name for name in names_of_day if not (HISTORY / name).exists())
    path.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    say(f"recorded in {path}")


def _columns(rows: Sequence[Row]) -> list[str]:
    """The figures that fit into a table; curves and lists are in the file only."""
    return list(
        dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list | dict))
    )


def _described(result: Mapping[str, Any]) -> str:
    on = result["machine"]
    return (
        f"commit {result['commit']}; {on['cores']} cores of {on['cpu']}, {on['memory_gib']} GiB; "
        f"Python {on['python']}, torch {on['torch']}"
    )


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)

"""`ravnest doctor [INVITE]`: checks whether this machine can be lent, and says how to fix what it finds."""

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from ravnest import units
from ravnest.cli.arguments import Subparsers
from ravnest.cli.join import host_and_port, memory_bytes

if TYPE_CHECKING:
    from ravnest.provider.doctor.checks import CheckResult


_STYLES = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "bold red")}


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command and its arguments."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine and, with an invite, the connection to its coordinator",
        description="Check whether this machine can join, and say how to fix each problem: Python and PyTorch, device, "
        "memory, disk and port; with an invite also the connection to the coordinator, the invite itself, versions and "
        "clocks. Nothing is changed, and the invite is not used up. Exit code 2 if there is a problem.",
    )
    parser.add_argument(
        "invite", metavar="INVITE", nargs="?", help="the line that the coordinator printed; - reads it from stdin"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 or mps (default: auto)")
    parser.add_argument("--memory", metavar="SIZE", type=memory_bytes, help="as for `ravnest join`")
    parser.add_argument("--listen", metavar="HOST:PORT", type=host_and_port, help="as for `ravnest join`")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, for other programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the result of each check; returns 2 if one is a problem, otherwise 0."""
    from ravnest.provider.doctor.checks import exit_code
    from ravnest.provider.doctor.doctor import DoctorOptions, examine

    invite = sys.stdin.readline().strip() if args.invite == "-" else args.invite
    wanted = DoctorOptions(invite, args.device, args.memory, args.listen or ("0.0.0.0", 0))
    findings: list[CheckResult] = []
    printer = _Printer() if not args.json else None

    def tell(finding: "CheckResult") -> None:
        findings.append(finding)
        if printer is not None:
            printer.show(finding)

    examine(wanted, tell)
    if printer is not None:
        printer.end(findings)
    else:
        counts = {level: sum(f.level == level for f in findings) for level in ("problem", "warning")}
        shown = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"problems": counts["problem"], "warnings": counts["warning"], "findings": shown}, indent=2))
    return exit_code(findings)


class _Printer:
    """Output with marks and colours on a terminal, and in plain words elsewhere."""

    def __init__(self) -> None:
        self._console: Any = None
        if sys.stdout.isatty() and "utf" in (sys.stdout.encoding or "").lower():
            from rich.console import Console

            self._console = Console(highlight=False)

    def show(self, finding: "CheckResult") -> None:
        from ravnest.errors import printable

        sentence, fix = printable(finding.sentence), printable(finding.fix)
        if self._console is None:
            print(f"{finding.level:<8} {finding.check:<11} {sentence}", flush=True)
            if fix:
                print(f"{'':<20} fix: {fix}", flush=True)
            return
        from rich.text import Text

        mark, style = _STYLES[finding.level]
        self._console.print(
            Text.assemble((mark, style), f" {finding.check:<11} ", (sentence, "" if finding.level == "ok" else style)),
            soft_wrap=True,
        )
        if fix:
            self._console.print(Text(f"{'':<14}→ {fix}"), soft_wrap=True)

    def end(self, findings: "list[CheckResult]") -> None:
        problems = sum(finding.level == "problem" for finding in findings)
        warnings = sum(finding.level == "warning" for finding in findings)
        if problems or warnings:
            print(f"{units.counted(problems, 'problem')}, {units.counted(warnings, 'warning')}")
        else:
            print("no problems found")

"""`ravnest invite RUN`: create, list and revoke the invites of a served run."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ravnest.cli.arguments import Subparsers, whole_number

if TYPE_CHECKING:
    from ravnest.coordinator.access.invites import AdmittedNode, Token


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command and its arguments."""
    parser = subparsers.add_parser(
        "invite",
        help="create, list and revoke invites to a served run",
        description="Create, list and revoke invites to a run of `ravnest serve`. Changes take effect immediately, "
        "also while the coordinator is running.",
    )
    parser.add_argument("path", metavar="RUN", type=Path, help="run directory")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--new", action="store_true", help="create an invite and print it")
    action.add_argument(
        "--revoke", metavar="ID", help="accept no further providers with this invite; those that joined with it stay"
    )
    action.add_argument(
        "--list", action="store_true", help="list the invites and the providers that joined with them (the default)"
    )
    parser.add_argument(
        "--uses", metavar="N", type=whole_number, help="with --new: how many providers may join with it (default: 20)"
    )
    parser.add_argument(
        "--hours", metavar="H", type=_hours, help="with --new: hours until it expires (default: 168, one week)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; raises RunError if the run was never served, or has no such invite."""
    if not args.new and (args.uses is not None or args.hours is not None):
        from ravnest.errors import RunError

        raise RunError("--uses and --hours apply to a new invite only: give --new as well")

    from ravnest.coordinator.access.admission import Admission
    from ravnest.coordinator.access.invites import DEFAULT_LIFETIME_SECONDS, DEFAULT_USES

    admission = Admission.of_run(args.path)
    try:
        if args.new:
            lifetime_seconds = DEFAULT_LIFETIME_SECONDS if args.hours is None else args.hours * 3600
            host, port = admission.tokens.advertised()
            invite = admission.invite(host, port, args.uses or DEFAULT_USES, lifetime_seconds)
            print(f"invite: ravnest join {invite.line}", flush=True)
        elif args.revoke:
            admission.tokens.revoke(args.revoke, time.time())
            print(f"invite {args.revoke} is revoked; providers that have joined with it stay")
        else:
            _print(admission.tokens.tokens(), admission.tokens.nodes())
    finally:
        admission.close()
    return 0


def _print(tokens: "list[Token]", nodes: "list[AdmittedNode]") -> None:
    now = time.time()
    for token in tokens:
        print(f"{token.id}  {_state(token, now)}  created {_when(token.created_at)}  {token.note}".rstrip())
        for node in nodes:
            if node.token_id == token.id:
                gone = "" if node.kicked_at is None else f", removed {_when(node.kicked_at)}"
                print(f"  {node.node_id}  joined {_when(node.joined_at)}{gone}")


def _state(token: "Token", now: float) -> str:
    if token.revoked_at is not None:
        return f"revoked {_when(token.revoked_at)}"
    if token.expires_at is not None and token.expires_at <= now:
        return f"expired {_when(token.expires_at)}"
    left = "unlimited uses" if token.uses_left is None else f"{token.uses_left} uses left"
    return left if token.expires_at is None else f"{left} until {_when(token.expires_at)}"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _hours(text: str) -> float:
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not 0 < hours <= 24 * 3650:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hours: write it as 24 or 0.5")
    return hours

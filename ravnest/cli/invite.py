"""`ravnest invite RUN`: the invites of a run that is served, new ones and the end of old ones."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ravnest.cli.train import whole_number

if TYPE_CHECKING:
    from ravnest.coordinator.access.invites import Node, Token

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: "Subparsers") -> None:
    """Add the command and its arguments."""
    parser = subparsers.add_parser(
        "invite",
        help="make, list and revoke invites to a run that is served",
        description="The invites of a run that `ravnest serve` has begun. What is changed here counts at once, also "
        "while the coordinator runs.",
    )
    parser.add_argument("path", metavar="RUN", type=Path, help="the run directory")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--new", action="store_true", help="make an invite and print it")
    action.add_argument(
        "--revoke", metavar="ID", help="let nobody join with this invite any more; who has joined stays"
    )
    action.add_argument("--list", action="store_true", help="list the invites and who joined with them (the default)")
    parser.add_argument("--uses", metavar="N", type=whole_number, help="with --new: how many may join (default: 20)")
    parser.add_argument(
        "--hours", metavar="H", type=_hours, help="with --new: for how long it can be used (default: 168, a week)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do what was asked; raises a RunError when the run is not one that was served, or has no such invite."""
    if not args.new and (args.uses is not None or args.hours is not None):
        from ravnest.errors import RunError

        raise RunError("--uses and --hours are for a new invite; give --new with them")

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
            print(f"invite {args.revoke} is revoked; those who have joined with it stay")
        else:
            _print(admission.tokens.tokens(), admission.tokens.nodes())
    finally:
        admission.close()
    return 0


def _print(tokens: "list[Token]", nodes: "list[Node]") -> None:
    now = time.time()
    for token in tokens:
        print(f"{token.id}  {_state(token, now)}  made {_when(token.created_at)}  {token.note}".rstrip())
        for node in nodes:
            if node.token_id == token.id:
                gone = "" if node.kicked_at is None else f", thrown out {_when(node.kicked_at)}"
                print(f"  {node.node_id}  joined {_when(node.joined_at)}{gone}")


def _state(token: "Token", now: float) -> str:
    if token.revoked_at is not None:
        return f"revoked {_when(token.revoked_at)}"
    if token.expires_at is not None and token.expires_at <= now:
        return f"expired {_when(token.expires_at)}"
    left = "any number of uses" if token.uses_left is None else f"{token.uses_left} uses left"
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

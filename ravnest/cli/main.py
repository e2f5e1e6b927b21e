"""The entry of the command line: runs the command, turns errors into a sentence and an exit code.

Each command is a file of this folder with `add_parser(subparsers)` and `run(args) -> int`. A file imports
argparse and the like at its top and what is heavy inside `run`, so that help is immediate.
"""

import argparse
import atexit
import difflib
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import ravnest
from ravnest.errors import RavnestError

COMMANDS = ("train", "serve", "join", "invite", "kick", "plan", "doctor", "status", "report", "export")

INTERRUPTED = 130
"""The exit code of a program that Ctrl-C ended, by the shell's convention (128 + SIGINT)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 the user can fix it, 130 interrupted, 1 our bug."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Nothing is left to collect at the end; looking through all of torch for it would take a second.
    atexit.register(gc.freeze)
    try:
        chosen = _parser(given).parse_args(given)
        code: int = chosen.run(chosen)
        return code
    except RavnestError as error:
        # What a job file raised itself is told in its own words first.
        sys.stderr.write(getattr(error, "user_traceback", ""))
        sys.stderr.write(f"ravnest: error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        sys.stderr.write("ravnest: interrupted\n")
        code = getattr(interrupt, "exit_code", INTERRUPTED)
        return code
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone: nothing is left to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        traceback.print_exc()
        sys.stderr.write("ravnest: this is a bug in Ravnest: please report it with the lines above\n")
        return 1


def _parser(given: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ravnest",
        description="Train one PyTorch model across many ordinary machines; none holds the whole model.",
    )
    parser.add_argument("--version", action="version", version=f"ravnest {ravnest.__version__}")
    named = given[0] if given else ""
    if named and not named.startswith("-") and named not in COMMANDS:
        near = difflib.get_close_matches(named, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        parser.error(f"there is no command {named!r}; {hint}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in [named] if named in COMMANDS else COMMANDS:
        module = import_module(f"ravnest.cli.{command}")
        module.add_parser(subparsers)
    return parser

"""Entry point of the command line: runs a command, turns errors into one sentence and an exit code.

Each command is a module of this package with `add_parser(subparsers)` and `run(args) -> int`. Heavy modules such as
torch are imported inside `run`, so that `--help` answers immediately.
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
"""Exit code after Ctrl-C, by the shell's convention (128 + SIGINT)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 success, 2 an error the user can fix, 130 interrupted, 1 a bug."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Skips the garbage collection at exit, which would take a second to walk through torch.
    atexit.register(gc.freeze)
    try:
        chosen = _parser(given).parse_args(given)
        code: int = chosen.run(chosen)
        return code
    except RavnestError as error:
        # If the job file raised the error, the user's own traceback comes first.
        sys.stderr.write(getattr(error, "user_traceback", ""))
        sys.stderr.write(f"ravnest: error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        sys.stderr.write("ravnest: interrupted\n")
        code = getattr(interrupt, "exit_code", INTERRUPTED)
        return code
    except BrokenPipeError:
        # The reader of the output is gone (`| head`); redirecting stdout prevents another error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        traceback.print_exc()
        sys.stderr.write("ravnest: this is a bug in Ravnest: please report it with the traceback above\n")
        return 1


def _parser(given: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ravnest",
        description="Train one PyTorch model across many ordinary machines, none of which holds the whole model.",
    )
    parser.add_argument("--version", action="version", version=f"ravnest {ravnest.__version__}")
    named = given[0] if given else ""
    if named and not named.startswith("-") and named not in COMMANDS:
        near = difflib.get_close_matches(named, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
        parser.error(f"there is no command {named!r}: {hint}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in [named] if named in COMMANDS else COMMANDS:
        module = import_module(f"ravnest.cli.{command}")
        module.add_parser(subparsers)
    return parser

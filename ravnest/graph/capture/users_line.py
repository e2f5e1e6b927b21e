"""Line of the user's code from which an error or an operator of a graph originates."""

import re
import traceback
from pathlib import Path

import torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in .*\n\s*(.*)')
_RAVNEST = str(Path(__file__).parents[2])
_NOT_THE_USERS = (str(Path(torch.__file__).parent), _RAVNEST, "<")

Frame = tuple[str, str, str]
"""File, line number and code."""


def line_of_error(error: BaseException) -> str:
    """` at file:line (code)` of the innermost frame in the user's code; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return _told([(f.filename, str(f.lineno), str(f.line)) for f in frames], own_only=True)


def line_of_trace(trace: str | None) -> str:
    """The same for a stack trace that torch keeps for an operator; a line of a library if there is no other."""
    return _told(_FRAME.findall(trace or ""), own_only=False)


def line_of_caller() -> str:
    """The same for the calling code."""
    return _told([(f.filename, str(f.lineno), str(f.line)) for f in traceback.extract_stack()], own_only=True)


def line_of_function(function: object) -> str:
    """` at file:line` of a function's definition; empty if unknown."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return f" at {code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def _told(frames: list[Frame], own_only: bool) -> str:
    outside = [f for f in frames if not f[0].startswith(_NOT_THE_USERS)]
    own = (
        [f for f in outside if "site-packages" not in f[0]]
        or outside
        or ([] if own_only else [f for f in frames if not f[0].startswith(_RAVNEST)])
    )
    return " at {}:{} (`{}`)".format(*own[-1]) if own else ""

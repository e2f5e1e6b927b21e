"""Runs of code that stand twice, the same or in the same shape with other names."""

import io
import keyword
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.house.finding import Breach, python_files

MAX_LINES: Final = 12
"""A run of more lines than this may stand once."""

_MIN_SHAPES: Final = 6
"""Fields or arguments in a row are no repetition: so many different shapes of lines a run must have."""


def breaches(root: Path) -> Iterator[Breach]:
    """Every run of more than `MAX_LINES` lines of code in this folder that stands twice, once for each pair."""
    seen: dict[tuple[str, ...], tuple[Path, int]] = {}
    told: defaultdict[tuple[Path, Path], int] = defaultdict(int)
    for path in python_files(root):
        shapes = list(_shapes(path.read_text(encoding="utf-8")))
        quiet_until = 0
        for start in range(len(shapes) - MAX_LINES):
            run = tuple(shape for _, shape in shapes[start : start + MAX_LINES + 1])
            if len(set(run)) < _MIN_SHAPES:
                continue
            first = seen.setdefault(run, (path, shapes[start][0]))
            if first[1] != shapes[start][0] or first[0] != path:
                if start >= quiet_until:
                    told[(first[0], path)] += 1
                    yield Breach(
                        path, shapes[start][0], f"the same {MAX_LINES + 1} lines or more as at {first[0]}:{first[1]}"
                    )
                quiet_until = start + MAX_LINES + 1


def _shapes(source: str) -> Iterator[tuple[int, str]]:
    """Each logical line of code with its number: names, numbers and strings are one word each; imports, comments and
    docstrings are left out."""
    line: list[str] = []
    number = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NEWLINE:
            shape = " ".join(line)
            if shape != "S" and not shape.startswith(("import", "from")):
                yield number, shape
            line = []
        elif token.type in (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            continue
        else:
            number = number if line else token.start[0]
            line.append(_word(token))


def _word(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.NAME:
        return token.string if keyword.iskeyword(token.string) else "N"
    return {tokenize.NUMBER: "9", tokenize.STRING: "S"}.get(token.type, token.string)

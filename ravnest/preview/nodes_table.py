"""Checked values of one table of a nodes.toml.

A value of the wrong type or outside its bounds is a PlanError that names the file, the line and the fix.
"""

import difflib
import re
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Any, Final, NoReturn, overload

from ravnest import units
from ravnest.errors import PlanError

MAX_CHARACTERS: Final = 64
"""Maximum length of a text, such as a name."""
MAX_MEMORY_BYTES: Final = 1 << 50

_MEANT: Final = {
    "ram": "memory",
    "mem": "memory",
    "latency": "ping_ms",
    "latency_ms": "ping_ms",
    "rtt_ms": "ping_ms",
    "ping": "ping_ms",
    "upload": "up_mbps",
    "upload_mbps": "up_mbps",
    "download": "down_mbps",
    "download_mbps": "down_mbps",
    "bandwidth": "up_mbps and down_mbps",
    "tflops": "gflops",
    "flops": "gflops",
    "nodes": "node",
    "provider": "node",
    "coordinator": "requester",
}
"""Words that users write for a key, and the key that they mean, where the spelling does not suggest it."""


Path = tuple[str | int, ...]
"""Keys of tables, and numbers within arrays of tables, such as ("node", 2, "memory")."""

_OPAQUE: Final = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}' + r"|'''.*?'{3,5}" + r'|"(?:[^"\\\n]|\\.)*"' + r"|'[^'\n]*'|\#[^\n]*", re.DOTALL
)
"""Strings and comments."""
_HEADER: Final = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]")
_KEY: Final = re.compile(r"\s*([^\s=\[\]{}][^=\[\]{}]*?)\s*=")


class SourceText:
    """The text of a nodes.toml, to tell where in it a mistake is: tomllib gives values without their lines."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self._text = text

    def line(self, path: Path) -> int:
        """The line, from 1, of the statement that sets this key, or else of the nearest table or key around it."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    @cached_property
    def _lines(self) -> dict[Path, int]:
        """The line of every header and of every key that begins a line. Computed when there is a mistake to report."""
        found: dict[Path, int] = {}
        tables: dict[str, int] = {}
        table: Path = ()
        text = _OPAQUE.sub(lambda match: _kept(match[0]), self._text)
        for number, line in enumerate(text.split("\n"), start=1):
            if header := _HEADER.match(line):
                name = header[2].strip("\"'")
                table = (name,)
                if header[1] == "[[":
                    table = (name, tables.get(name, 0))
                    tables[name] = table[1] + 1
                found.setdefault((name,), number)
                found[table] = number
            elif key := _KEY.match(line):
                path = tuple(part.strip(" \t\"'") for part in key[1].split("."))
                for end in range(1, len(path) + 1):
                    found.setdefault((*table, *path[:end]), number)
        return found


def _kept(opaque: str) -> str:
    """A string of one line as it is, since it may be a key; otherwise the line ends alone."""
    return opaque if opaque[0] in "\"'" and "\n" not in opaque else "\n" * opaque.count("\n")


def quoted(text: str) -> str:
    return f'"{text[:MAX_CHARACTERS]}"'


def nearest(name: str, known: Iterable[str]) -> str:
    """A fix for an unknown name: "did you mean anna?", or the names there are."""
    names = list(known)[:1000]
    near = difflib.get_close_matches(name[:MAX_CHARACTERS], names, n=1)
    if near:
        return f"did you mean {near[0]}?"
    shown = ", ".join(names[:8])
    return f"the names are {shown}{' and others' if len(names) > 8 else ''}"


class Table:
    """One table of the file. `title` names the table in error messages."""

    def __init__(self, values: dict[str, Any], path: Path, source: SourceText, title: str) -> None:
        self._values = values
        self._path = path
        self.source = source
        self.title = title

    def has(self, key: str) -> bool:
        return key in self._values

    def line(self, key: str) -> int:
        return self.source.line((*self._path, key))

    def fail(self, key: str, sentence: str) -> NoReturn:
        """Raises a PlanError at the line of this key."""
        raise PlanError(f"{self.source.name}:{self.line(key)}: {sentence}")

    def check_keys(self, known: Collection[str], fix: str = "") -> None:
        """PlanError where the table has another key than these; `fix` is told where no known key is similar."""
        for key in self._values:
            if key in known:
                continue
            near = difflib.get_close_matches(key[:MAX_CHARACTERS].lower(), known, n=1, cutoff=0.6)
            meant = _MEANT.get(key.lower(), near[0] if near else "")
            fit = meant and all(each in known for each in meant.split(" and "))
            fix = f"did you mean {meant}?" if fit else fix or f"the keys are {', '.join(known)}"
            self.fail(key, f"{quoted(key)} in {self.title} is not known: {fix}")

    def table(self, key: str) -> "Table":
        """The table under a key; an empty one if the file has none."""
        value = self._values.get(key, {})
        if not isinstance(value, dict):
            self.fail(key, f"{key} is {_shown(value)}: write [{key}] once, on a line of its own, and its keys below")
        return Table(value, (*self._path, key), self.source, key)

    def tables(self, key: str) -> list["Table"]:
        """The tables of an array of tables; an empty list if the file has none."""
        value = self._values.get(key, [])
        if isinstance(value, dict):
            self.fail(key, f"[{key}] has single brackets: write [[{key}]] before each {key}")
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            self.fail(key, f"{key} is {_shown(value)}: write [[{key}]] on a line of its own, and its keys below")
        return [Table(each, (*self._path, key, i), self.source, key) for i, each in enumerate(value)]

    def text(self, key: str, default: str | None = None) -> str:
        if key not in self._values:
            if default is not None:
                return default
            self.fail("", f'{self.title} has no {key}: give it one, as in {key} = "anna"')
        value = self._values[key]
        if not isinstance(value, str):
            self.fail(key, f'{key} of {self.title} is {_shown(value)}, which is not text: write it as {key} = "anna"')
        return self._checked(key, value)

    def texts(self, key: str) -> list[str]:
        value = self._values[key]
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            self.fail(key, f'{key} of {self.title} is not a list of names: write it as {key} = ["anna", "ben"]')
        return [self._checked(key, each) for each in value]

    def size(self, key: str) -> int:
        """A number of bytes, which the file gives as text with a unit."""
        if key not in self._values:
            self.fail("", f'{self.title} has no {key}: say how much memory it lends, as in {key} = "8GB"')
        value = self._values[key]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and 0 < value < 1e6:
            self.fail(key, f'{key} of {self.title} is {value} without a unit: write it as {key} = "{value}GB"')
        size = units.parse_byte_size(value) if isinstance(value, str) else None
        if size is None:
            self.fail(key, f'{key} of {self.title} is {_shown(value)}, which is not a size: write it as {key} = "8GB"')
        if size > MAX_MEMORY_BYTES:
            self.fail(
                key,
                f"{key} of {self.title} is {_shown(value)}, more than any machine has: give the memory that it lends",
            )
        return size

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"{key} of {self.title} is {_shown(value)}: write {key} = true or {key} = false")
        return value

    def whole(self, key: str, minimum: int, maximum: int, default: int) -> int:
        value = self._values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            self.fail(
                key, f"{key} of {self.title} is {_shown(value)}: give a whole number from {minimum:,} to {maximum:,}"
            )
        return value

    @overload
    def number(self, key: str, minimum: float, maximum: float, default: float) -> float: ...

    @overload
    def number(self, key: str, minimum: float, maximum: float, default: None) -> float | None: ...

    def number(self, key: str, minimum: float, maximum: float, default: float | None) -> float | None:
        if key not in self._values:
            return default
        value = self._values[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not minimum <= value <= maximum:
            bounds = f"from {minimum:.15g} to {maximum:,.15g}"
            if is_number and value <= 0 < minimum:
                bounds = "above 0"
            hint = " without quotes" if isinstance(value, str) else ""
            self.fail(key, f"{key} of {self.title} is {_shown(value)}: give a number {bounds}{hint}")
        return float(value)

    def _checked(self, key: str, text: str) -> str:
        text = text.strip()
        if not text or len(text) > MAX_CHARACTERS or not text.isprintable():
            self.fail(
                key,
                f"{key} of {self.title} is {_shown(text)}: give text of 1 to {MAX_CHARACTERS} printable characters",
            )
        return text


def _shown(value: Any) -> str:
    """A value in a few words, for an error message."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        short = value if len(value) <= 40 else f"{value[:37]}..."
        return f'"{short}"' if value else "empty"
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge number"
    if isinstance(value, int | float):
        return str(value)
    return {"list": "a list", "dict": "a table"}.get(type(value).__name__, "a date or time")

"""Values out of one table of a nodes.toml, each checked: of its type, within its bounds, or the line and the fix."""

import difflib
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Any, Final, NoReturn, overload

from ravnest import units
from ravnest.errors import PlanError
from ravnest.preview.toml_lines import Lines, Path

MAX_CHARACTERS: Final = 64
"""Of a name."""
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
"""What people write, where that is not spelt nearly like it."""


class Where:
    """The text that is read, for telling the place of a mistake."""

    def __init__(self, source: str, text: str) -> None:
        self.source = source
        self._text = text

    @cached_property
    def lines(self) -> Lines:
        """Looked for only when there is something to tell."""
        return Lines(self._text)

    @staticmethod
    def quoted(text: str) -> str:
        return f'"{text[:MAX_CHARACTERS]}"'

    @staticmethod
    def nearest(name: str, known: Iterable[str]) -> str:
        """ "did you mean anna?", or what there is."""
        names = list(known)[:1000]
        near = difflib.get_close_matches(name[:MAX_CHARACTERS], names, n=1)
        if near:
            return f"did you mean {near[0]}?"
        shown = ", ".join(names[:8])
        return f"the names are {shown}{' and others' if len(names) > 8 else ''}"


class Table:
    """One table; `title` is what its mistakes are told of."""

    def __init__(self, values: dict[str, Any], path: Path, where: Where, title: str) -> None:
        self._values = values
        self._path = path
        self._where = where
        self.title = title

    def has(self, key: str) -> bool:
        return key in self._values

    def line(self, key: str) -> int:
        return self._where.lines.of((*self._path, key))

    def fail(self, key: str, sentence: str) -> NoReturn:
        """A PlanError at the line of this key."""
        raise PlanError(f"{self._where.source}:{self.line(key)}: {sentence}")

    def only(self, known: Collection[str], what: str = "") -> None:
        """Nothing but these keys may be there."""
        for key in self._values:
            if key in known:
                continue
            near = difflib.get_close_matches(key[:MAX_CHARACTERS].lower(), known, n=1, cutoff=0.6)
            meant = _MEANT.get(key.lower(), near[0] if near else "")
            fit = meant and all(each in known for each in meant.split(" and "))
            fix = f"did you mean {meant}?" if fit else what or f"the keys are {', '.join(known)}"
            self.fail(key, f"{self._where.quoted(key)} in {self.title} is not known: {fix}")

    def table(self, key: str) -> "Table":
        """The table under a key, empty where there is none."""
        value = self._values.get(key, {})
        if not isinstance(value, dict):
            self.fail(key, f"{key} is {_shown(value)}: write [{key}] in a line of its own, once, and its keys below")
        return Table(value, (*self._path, key), self._where, key)

    def tables(self, key: str) -> list["Table"]:
        """The tables of an array of tables, none where there is none."""
        value = self._values.get(key, [])
        if isinstance(value, dict):
            self.fail(key, f"[{key}] stands in single brackets: write [[{key}]] before each {key}")
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            self.fail(key, f"{key} is {_shown(value)}: write [[{key}]] in a line of its own, and its keys below")
        return [Table(each, (*self._path, key, i), self._where, key) for i, each in enumerate(value)]

    def text(self, key: str, default: str | None = None) -> str:
        if key not in self._values:
            if default is not None:
                return default
            self.fail("", f'{self.title} has no {key}: give it one, as in {key} = "anna"')
        value = self._values[key]
        if not isinstance(value, str):
            self.fail(key, f'{key} of {self.title} is {_shown(value)} and not a text: write it as {key} = "anna"')
        return self._checked(key, value)

    def texts(self, key: str) -> list[str]:
        value = self._values[key]
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            self.fail(key, f'{key} of {self.title} is not a list of names: write it as {key} = ["anna", "ben"]')
        return [self._checked(key, each) for each in value]

    def size(self, key: str) -> int:
        """Bytes, of a text with a unit."""
        if key not in self._values:
            self.fail("", f'{self.title} has no {key}: say how much it lends, as in {key} = "8GB"')
        value = self._values[key]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and 0 < value < 1e6:
            self.fail(key, f'{key} of {self.title} is {value} without a unit: write it as {key} = "{value}GB"')
        size = units.parse_byte_size(value) if isinstance(value, str) else None
        if size is None:
            self.fail(key, f'{key} of {self.title} is {_shown(value)} and not a size: write it as {key} = "8GB"')
        if size > MAX_MEMORY_BYTES:
            self.fail(key, f"{key} of {self.title} is {_shown(value)}, more than any machine has: give what it lends")
        return size

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, f"{key} of {self.title} is {_shown(value)}: write {key} = true or {key} = false")
        return value

    def whole(self, key: str, least: int, most: int, default: int) -> int:
        value = self._values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.fail(key, f"{key} of {self.title} is {_shown(value)}: give a whole number from {least:,} to {most:,}")
        return value

    @overload
    def number(self, key: str, least: float, most: float, default: float) -> float: ...

    @overload
    def number(self, key: str, least: float, most: float, default: None) -> float | None: ...

    def number(self, key: str, least: float, most: float, default: float | None) -> float | None:
        if key not in self._values:
            return default
        value = self._values[key]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            bounds = f"from {least:.15g} to {most:,.15g}"
            if is_number and value <= 0 < least:
                bounds = "above 0"
            hint = " and no quotes" if isinstance(value, str) else ""
            self.fail(key, f"{key} of {self.title} is {_shown(value)}: give a number {bounds}{hint}")
        return float(value)

    def _checked(self, key: str, text: str) -> str:
        text = text.strip()
        if not text or len(text) > MAX_CHARACTERS or not text.isprintable():
            self.fail(
                key,
                f"{key} of {self.title} is {_shown(text)}: give a text of 1 to {MAX_CHARACTERS} plain characters",
            )
        return text


def _shown(value: Any) -> str:
    """A value in a few words, whatever it is."""
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

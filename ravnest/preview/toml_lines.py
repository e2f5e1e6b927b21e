"""In which line of a TOML text a value stands: the standard reader gives values, and forgets where they were.

For texts that `tomllib` has read: what is not valid TOML has its line in the reader's own error.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

Path = tuple[str | int, ...]
"""The way to a value: keys of tables, and numbers within arrays, such as ("node", 2, "memory")."""


class Lines:
    """Where the values of one text stand."""

    def __init__(self, text: str) -> None:
        self._found = _Walk(text).lines()

    def of(self, path: Path) -> int:
        """The line, from 1, of the key or array element; where there is none, of the nearest table around it."""
        while path and path not in self._found:
            path = path[:-1]
        return self._found.get(path, 1)


_TOKEN: Final = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}' + r"|'''.*?'{3,5}" + r'|"(?:[^"\\\n]|\\.)*"' + r"|'[^'\n]*'"
    r"|\#[^\n]*|\n|[\[\]{},=]|[^\s\#\"'\[\]{},=]+",
    re.DOTALL,
)


@dataclass
class _Open:
    """An array or an inline table that has not ended yet."""

    path: Path
    index: int | None = None
    """Of the element that comes next; None for a table."""


@dataclass
class _Walk:
    """Through the text from statement to statement: each is a header, or a key and its value."""

    text: str
    found: dict[Path, int] = field(default_factory=dict)
    counts: dict[Path, int] = field(default_factory=dict)
    """Tables so far in every array of tables."""
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Keys that were taken apart before: most come again in every table."""

    def lines(self) -> dict[Path, int]:
        table: Path = ()
        current: Path = ()
        inside: list[_Open] = []
        expects, key, key_line, doubled = "key", "", 1, False
        for token, line in self._tokens():
            if token == "\n":
                if not inside:
                    expects, key = "key", ""
            elif expects == "header":
                if token == "[":
                    doubled = True
                elif token == "]":
                    table = self._header(key, key_line, doubled)
                    expects = "end"
                else:
                    key += token
            elif expects == "key":
                if token == "=":
                    current = (inside[-1].path if inside else table) + self._keys(key)
                    self.found.setdefault(current, key_line)
                    expects, key = "value", ""
                elif token == "[" and not inside:
                    expects, key_line, doubled = "header", line, False
                elif token == "}":
                    inside.pop()
                    expects = "end"
                else:
                    key_line = line if not key else key_line
                    key += token
            elif expects == "value":
                if token == "]":
                    inside.pop()
                    expects = "end"
                    continue
                self.found.setdefault(current, line)
                if token == "[":
                    inside.append(_Open(current, 0))
                    current = (*current, 0)
                elif token == "{":
                    inside.append(_Open(current))
                    expects, key = "key", ""
                else:
                    expects = "end"
            elif token in "]}" and inside:
                inside.pop()
            elif token == "," and inside:
                expects, key = "key", ""
                if (index := inside[-1].index) is not None:
                    inside[-1].index = index + 1
                    current = (*inside[-1].path, index + 1)
                    expects = "value"
        return self.found

    def _tokens(self) -> Iterator[tuple[str, int]]:
        line = 1
        for match in _TOKEN.finditer(self.text):
            token = match[0]
            if not token.startswith("#"):
                yield token, line
            line += token.count("\n")

    def _header(self, key: str, line: int, doubled: bool) -> Path:
        names = self._keys(key)
        table: Path = ()
        for name in names[:-1]:
            table = self._newest((*table, name))
        table = (*table, names[-1])
        if not doubled:
            table = self._newest(table)
            self.found.setdefault(table, line)
            return table
        number = self.counts.get(table, 0)
        self.counts[table] = number + 1
        self.found.setdefault(table, line)
        self.found[*table, number] = line
        return (*table, number)

    def _newest(self, path: Path) -> Path:
        """An array of tables stands for its last one."""
        return (*path, self.counts[path] - 1) if path in self.counts else path

    def _keys(self, written: str) -> tuple[str, ...]:
        """`a."b c".d` as three names."""
        known = self.names.get(written)
        if known is None:
            names = []
            value = tomllib.loads(f"{written} = 0")
            while isinstance(value, dict):
                ((name, value),) = value.items()
                names.append(name)
            known = self.names[written] = tuple(names)
        return known

"""Words that the project does not use, and where they still stand.

The list is here and nowhere else. A word is looked for in docstrings, comments, messages and names alike; the rule on
how a sentence begins holds for docstrings, comments and the prose of pages.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.house.finding import Breach, python_files

BANNED: Final = {
    "anew": "again",
    "so many": "the number, or 'this many'",
    "so much": "the amount, or 'this much'",
    "whoever": "the provider, the caller: name the subject",
    "somebody": "name the subject: a provider, a user",
    "someone": "name the subject: a provider, a user",
    "everybody": "all providers, all stages: name the subject",
    "nobody": "no provider, no stage: name the subject",
    "beside": "next to, besides or with",
    "of now": "current",
    "at hand": "available",
    "in vain": "without success",
    "learnt": "learned",
    "alike": "the same, or both",
    "hence": "so",
}
"""Each with what to write in its place."""

BANNED_PREFIXES: Final = {"most": "max_", "least": "min_"}
"""First words of names, each with what to write in its place."""

STAND_INS: Final = ("Of", "What", "Who", "Whoever", "Where")
"""A sentence does not begin with one of these as a stand-in for a noun or a condition; a question may."""

CONTRACTS: Final = ("nobody_takes", "not_formed_anew")
"""Event kinds that other programs read. They keep their names."""

_CONTRACTS = re.compile("|".join(CONTRACTS))
_WORDS = re.compile(
    r"(?<![a-z])(?:" + "|".join(w.replace(" ", r"[\s_]+(?:#\s*)?") for w in BANNED) + r")(?![a-z])", re.IGNORECASE
)
_PREFIXES = re.compile(r"(?<![\w-])_*(" + "|".join(BANNED_PREFIXES) + r")_[a-z]\w*", re.IGNORECASE)
_SENTENCE = re.compile(
    r"(?:^|(?<=[.!?:;]\s)|(?<=[.!?:;]\n))\s*(?:[-*#\d.]*\s+)?((?:" + "|".join(STAND_INS) + r")\b[^.!?]*[.!?]?)",
    re.MULTILINE,
)
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def breaches(root: Path) -> Iterator[Breach]:
    """What in this file or folder is not plain: Python and Markdown."""
    for path in python_files(root):
        source = path.read_text(encoding="utf-8")
        yield from _words(path, source)
        for line, prose in _prose_of_python(source):
            yield from _beginnings(path, line, prose)
    for path in [root] if root.is_file() else sorted(root.rglob("*.md")):
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            yield from _words(path, text)
            yield from _beginnings(path, 1, _FENCED.sub(lambda code: "\n" * code.group().count("\n"), text))


def _words(path: Path, text: str) -> Iterator[Breach]:
    text = _CONTRACTS.sub(lambda kind: "." * len(kind.group()), text)
    for found in _WORDS.finditer(text):
        word = re.sub(r"[\s_#]+", " ", found.group()).lower()
        yield Breach(path, _line(text, found.start()), f"{word!r}: write {BANNED[word]}")
    for found in _PREFIXES.finditer(text):
        instead = BANNED_PREFIXES[found.group(1).lower()]
        yield Breach(path, _line(text, found.start()), f"the name {found.group()!r}: begin it with {instead}")


def _beginnings(path: Path, line: int, prose: str) -> Iterator[Breach]:
    for found in _SENTENCE.finditer(prose):
        sentence = found.group(1)
        if not sentence.endswith("?"):
            begins = " ".join(sentence.split()[:5])
            yield Breach(
                path, line + _line(prose, found.start(1)) - 1, f"a sentence begins with {begins!r}: name its subject"
            )


def _prose_of_python(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings, and each run of comment lines, with the line that it begins on."""
    comment: list[str] = []
    began, docstring_may_come = 0, True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if comment and token.start[0] != began + len(comment):
                yield began, "\n".join(comment)
                comment = []
            began = began if comment else token.start[0]
            comment.append(token.string.lstrip("# "))
        elif token.type == tokenize.STRING and docstring_may_come:
            yield token.start[0], token.string.strip("\"' \n")
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            docstring_may_come = token.type == tokenize.NEWLINE
    if comment:
        yield began, "\n".join(comment)


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1

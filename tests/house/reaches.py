"""What a test may touch: public names, and helpers that live outside test modules.

A test that reads `x._y` or replaces a private constant has to change with every change of the code that keeps its
promises. A class that a test has to steer gets a public name, or its durations as an argument.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.house.finding import Breach, python_files

OURS: Final = ("ravnest", "tests", "benchmarks", "examples", "docs", "proto")
"""Private names of any other library are that library's business: `torch.ops.aten._softmax` is an operator."""

PUBLIC_ANYWAY: Final = {"_replace", "_asdict", "_fields", "_make", "_schema", "_actions"}
"""Names of other libraries' objects: of named tuples, torch's operators, and the parsers of argparse."""

_REPLACING: Final = {"setattr", "delattr", "getattr", "hasattr", "object"}
"""Calls that take the name of an attribute as text; `object` is `mock.patch.object`."""


def breaches(root: Path) -> Iterator[Breach]:
    """Every reach into a private name, and every import from a test module, in this file or folder."""
    for path in python_files(root):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        foreign = _foreign_modules(tree)
        for node in ast.walk(tree):
            yield from (Breach(path, node.lineno, text) for text in _found(node, foreign))  # type: ignore[attr-defined]


def _found(node: ast.AST, foreign: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and _is_private(node.attr):
        base = _base(node)
        if base not in foreign and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
            yield f"reaches into the private name {ast.unparse(node)!r}: use a public one"
    elif isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in _REPLACING and (name := _named_privately(node)):
            yield f"reaches into the private name {name!r} by its text: pass the value as an argument"
    elif isinstance(node, ast.ImportFrom | ast.Import):
        yield from _imports(node)


def _imports(node: ast.ImportFrom | ast.Import) -> Iterator[str]:
    module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
    for each in node.names:
        parts = [*module.split("."), *each.name.split(".")]
        if "tests" in parts and any(part.startswith("test_") for part in parts):
            yield f"imports from the test module {module or each.name!r}: move the helper to a module of its own"
        elif parts[0] in OURS and _is_private(each.name):
            yield f"imports the private name {each.name!r}: use a public one"


def _named_privately(call: ast.Call) -> str:
    for each in call.args[:2]:
        text = each.value if isinstance(each, ast.Constant) and isinstance(each.value, str) else ""
        if text and _is_private(text.rpartition(".")[2]):
            return text
    return ""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC_ANYWAY and name != "_"


def _base(node: ast.expr) -> str:
    """The first name of `a.b.c`; empty where it begins with anything else, `super` for `super().x`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
        return "super"
    return node.id if isinstance(node, ast.Name) else ""


def _foreign_modules(tree: ast.Module) -> set[str]:
    """The names under which this file knows modules of the standard library and of other libraries."""
    found = {"super"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(each.asname or each.name.split(".")[0]) for each in node.names if not _is_ours(each.name)}
        elif isinstance(node, ast.ImportFrom) and not node.level and not _is_ours(node.module or ""):
            found |= {each.asname or each.name for each in node.names}
    return found


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in OURS

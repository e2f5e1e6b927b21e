"""How large a room, a class and a function may be, and that a class name means one thing.

A larger one is allowed with its reason next to it: a comment that begins with "# Large:" on the line above the class or
function, or on its first line.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.house.finding import Breach, python_files

MAX_MODULES: Final = 20
MAX_FUNCTION_LINES: Final = 60
MAX_ATTRIBUTES: Final = 20
MAX_CONSTRUCTOR_ARGUMENTS: Final = 8
REASON: Final = "# Large: "


def breaches(root: Path) -> Iterator[Breach]:
    """What in this folder is too large, has a name that stands twice, or does not say what it may know."""
    names: defaultdict[str, list[tuple[Path, int]]] = defaultdict(list)
    rooms: defaultdict[Path, int] = defaultdict(int)
    for path in python_files(root):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        if path.name == "__init__.py":
            if not _says_what_it_knows(ast.get_docstring(tree) or ""):
                yield Breach(path, 1, "the docstring of a package says what it may know ('Knows …' or 'May know …')")
        else:
            rooms[path.parent] += 1
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names[node.name].append((path, node.lineno))
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or _has_reason(lines, node):
                continue
            yield from (Breach(path, node.lineno, f"{node.name} {text}") for text in _too_large(node))
    for room, count in rooms.items():
        if count > MAX_MODULES:
            yield Breach(room, 0, f"{count} modules; {MAX_MODULES} at most")
    for name, places in names.items():
        for path, line in places[1:]:
            yield Breach(path, line, f"class {name} stands in {places[0][0]}:{places[0][1]} too: one name, one thing")


def _too_large(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    if not isinstance(node, ast.ClassDef):
        count = (node.end_lineno or node.lineno) - node.lineno + 1
        if count > MAX_FUNCTION_LINES:
            yield f"has {count} lines; {MAX_FUNCTION_LINES} at most"
        return
    attributes = _attributes(node)
    if len(attributes) > MAX_ATTRIBUTES:
        yield f"has {len(attributes)} attributes; {MAX_ATTRIBUTES} at most"
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__" and not _overloaded(method):
            arguments = len(method.args.posonlyargs + method.args.args) - 1 + len(method.args.kwonlyargs)
            if arguments > MAX_CONSTRUCTOR_ARGUMENTS:
                yield f"takes {arguments} arguments to construct; {MAX_CONSTRUCTOR_ARGUMENTS} at most"


def _attributes(node: ast.ClassDef) -> set[str]:
    found = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for each in ast.walk(node):
        is_stored = isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if is_stored and isinstance(each.value, ast.Name) and each.value.id == "self":
            found.add(each.attr)
    return found


def _overloaded(method: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in method.decorator_list)


def _has_reason(lines: Sequence[str], node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    around = [*lines[max(0, first - 4) : first - 1], lines[node.lineno - 1]]
    return any(REASON in line and len(line.split(REASON)[1]) > 10 for line in around)


def _says_what_it_knows(docstring: str) -> bool:
    words = docstring.lower().replace("\n", " ")
    return "knows" in words or "may know" in words

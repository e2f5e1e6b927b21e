"""Finds what could run a stranger's code: reads the source of a package, follows its imports, and names each place.

Nothing is imported or run here: the source is parsed, names are traced back to what they were imported as, and a place
is a finding whether the forbidden thing is called, passed on or only given another name.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FORBIDDEN_MODULES = frozenset(
    """
    _pickle cPickle cloudpickle code codeop copyreg dill imp importlib joblib jsonpickle marshal multiprocessing pickle
    pickletools pkgutil pty runpy shelve subprocess torch.distributed.rpc torch.hub torch.jit torch.multiprocessing
    torch.package torch.utils.cpp_extension torch.utils.model_zoo yaml zipimport
    """.split()
)
"""Importing one of these, or reaching into it, is a finding."""

FORBIDDEN_NAMES = frozenset(
    """
    ctypes.CDLL ctypes.LibraryLoader ctypes.PyDLL ctypes.cdll ctypes.pydll numpy.lib.format numpy.load
    operator.attrgetter operator.methodcaller os.execl os.execle os.execlp os.execlpe os.execv os.execve os.execvp
    os.execvpe os.popen os.posix_spawn os.posix_spawnp os.spawnl os.spawnle os.spawnlp os.spawnlpe os.spawnv os.spawnve
    os.spawnvp os.spawnvpe os.system pandas.read_pickle torch.classes torch.compile torch.export.load torch.export.save
    torch.load torch.ops.load_library torch.save torch.serialization types.CodeType types.FunctionType
    """.split()
)
"""Naming one of these, by whatever name, is a finding."""

FORBIDDEN_BUILTINS = frozenset({"__builtins__", "__import__", "breakpoint", "compile", "eval", "exec"})


@dataclass(frozen=True, order=True)
class Finding:
    """One place. `function` is the enclosing function or class, as in `Stage.restore`; empty at the top of a module."""

    module: str
    line: int
    function: str
    what: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} ({self.function or 'top level'}): {self.what}"


def modules_of(root: Path) -> dict[str, Path]:
    """Every module of the package in the folder `root`, by its dotted name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def reachable(modules: Mapping[str, Path], rooms: list[str]) -> set[str]:
    """The modules of these rooms (packages, by dotted name) and every module that importing them can bring in."""
    todo = [name for name in modules if any(name == room or name.startswith(f"{room}.") for room in rooms)]
    seen: set[str] = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        tree = ast.parse(modules[name].read_text(), str(modules[name]))
        for imported in imported_names(tree, name, modules[name].name == "__init__.py"):
            parts = imported.split(".")
            # Importing a.b.c runs a, a.b and a.b.c; the last part may also be a thing inside of a.b.
            todo += [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        todo = [name for name in todo if name in modules]
    return seen


def imported_names(tree: ast.Module, module: str, is_package: bool) -> Iterator[str]:
    """The dotted names a module imports, anywhere in it; `from a import b` gives a.b. What is only for a type checker
    is left out."""
    for node in _running_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, module, is_package)
            yield from (base if alias.name == "*" else f"{base}.{alias.name}" for alias in node.names)


def findings(source: str, module: str, is_package: bool = False) -> list[Finding]:
    """Every forbidden thing in a module's source, in order."""
    tree = ast.parse(source)
    finder = _Finder(module, is_package, tree)
    finder.visit(tree)
    return sorted(finder.found)


class _Finder(ast.NodeVisitor):
    def __init__(self, module: str, is_package: bool, tree: ast.Module) -> None:
        self.found: set[Finding] = set()
        self._module = module
        self._is_package = is_package
        self._where: list[str] = []
        self._strings = _constants(tree)
        self._names: dict[str, str] = {}
        # Twice: a name may be given to something that was imported further down, in a function that runs later.
        for _ in range(2):
            for node in ast.walk(tree):
                self._learn(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._judge(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = _base(node, self._module, self._is_package)
        for alias in node.names:
            if alias.name == "*":
                self._add(node, f"from {base} import *, which cannot be followed")
            self._judge(node, base if alias.name == "*" else f"{base}.{alias.name}")

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._where.append(node.name)
        self.generic_visit(node)
        self._where.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815
    visit_ClassDef = visit_FunctionDef  # noqa: N815

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Call):
            dotted = self._dotted(node)
            if dotted is not None:
                self._judge(node, dotted)
        if isinstance(node, ast.Call):
            self._judge_call(node)
        super().generic_visit(node)

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                self._names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, self._module, self._is_package)
            self._names.update({alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names})
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            dotted = self._dotted(node.value)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if dotted is not None:
                self._names.update({target.id: dotted for target in targets if isinstance(target, ast.Name)})

    def _dotted(self, node: ast.AST) -> str | None:
        """What an expression names, as a dotted name of where it was imported from; None for anything else."""
        if isinstance(node, ast.Name):
            known = self._names.get(node.id)
            return f"builtins.{node.id}" if known is None and node.id in FORBIDDEN_BUILTINS else known
        if isinstance(node, ast.Attribute):
            base = self._dotted(node.value)
            return None if base is None else f"{base}.{node.attr}"
        if isinstance(node, ast.Subscript):
            return self._member(self._table(node.value), node.slice)
        if isinstance(node, ast.Call):
            if self._called(node) == "builtins.getattr" and len(node.args) > 1:
                return self._member(self._dotted(node.args[0]), node.args[1])
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop", "setdefault") and node.args:
                return self._member(self._table(node.func.value), node.args[0])
            if self._called(node) == "importlib.import_module" and node.args:
                return self._text(node.args[0])
        return None

    def _table(self, node: ast.AST) -> str | None:
        """Whose names a table holds: `x.__dict__` and `vars(x)` those of x, `sys.modules` all; None for others."""
        dotted = self._dotted(node)
        if dotted == "sys.modules":
            return ""
        if dotted is not None and dotted.endswith(".__dict__"):
            return dotted.removesuffix(".__dict__")
        if isinstance(node, ast.Call):
            if self._called(node) == "builtins.vars" and node.args:
                return self._dotted(node.args[0])
            if self._called(node) in ("builtins.globals", "builtins.locals"):
                return "builtins"
        return None

    def _called(self, node: ast.Call) -> str | None:
        if isinstance(node.func, ast.Name) and node.func.id not in self._names:
            return f"builtins.{node.func.id}"
        return self._dotted(node.func)

    def _member(self, base: str | None, name: ast.AST) -> str | None:
        text = self._text(name)
        if base is None or text is None:
            return None
        return f"{base}.{text}" if base else text

    def _text(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self._strings.get(node.id)
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None

    def _judge_call(self, node: ast.Call) -> None:
        if self._called(node) == "builtins.getattr" and len(node.args) > 1:
            base = self._dotted(node.args[0])
            if base is not None and self._text(node.args[1]) is None:
                self._add(node, f"getattr({base}, …) with a name that is computed")
        for keyword in node.keywords:
            value = getattr(keyword.value, "value", None)
            if keyword.arg == "allow_pickle" and value is not False:
                self._add(node, "allow_pickle")
            if keyword.arg == "weights_only" and value is not True:
                self._add(node, "weights_only=False")

    def _judge(self, node: ast.AST, dotted: str) -> None:
        parts = dotted.split(".")
        prefixes = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        if prefixes & (FORBIDDEN_MODULES | FORBIDDEN_NAMES):
            self._add(node, dotted)
        elif parts[0] == "builtins" and len(parts) > 1 and parts[1] in FORBIDDEN_BUILTINS:
            self._add(node, parts[1])

    def _add(self, node: ast.AST, what: str) -> None:
        self.found.add(Finding(self._module, getattr(node, "lineno", 0), ".".join(self._where), what))


def _base(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The absolute name of what `from … import` imports from."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _constants(tree: ast.Module) -> dict[str, str]:
    """The names that a module's top level gives to a text, and to nothing else."""
    found: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
    texts = {}
    for name, values in found.items():
        if len(values) == 1 and isinstance(values[0], ast.Constant) and isinstance(values[0].value, str):
            texts[name] = values[0].value
    return texts


def _running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield other
                yield from _running_nodes(other)
            continue
        yield child
        yield from _running_nodes(child)

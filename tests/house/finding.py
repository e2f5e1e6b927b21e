"""One broken rule of the house, and the files that the rules are about."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Breach:
    """A place that breaks a rule, and the way to mend it."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def python_files(root: Path) -> Iterator[Path]:
    """The Python files below a folder (or the file itself), without generated ones."""
    found = [root] if root.is_file() else sorted(root.rglob("*.py"))
    return (path for path in found if path.suffix == ".py" and not path.stem.endswith("_pb2"))

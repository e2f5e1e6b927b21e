"""References to jobs: `path/to/file.py`, `file.py:name` or `package.module:name`.

Parsing imports and runs nothing, so that a wrong name is reported immediately.
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from ravnest.errors import JobError

_FORMS = "path/to/file.py, file.py:name or package.module:name"


@dataclass(frozen=True)
class JobReference:
    """A job, given by its file or module and its name there."""

    place: str
    """The file as given, or the dotted name of the module."""
    name: str
    path: Path | None
    """The file; None for a module."""

    @property
    def title(self) -> str:
        """Display name of the job; a file called job.py is known by its folder, such as `examples/digits/job.py`."""
        if self.path is None:
            return self.place
        return self.path.parent.name if self.path.stem == "job" else self.path.stem


def parse_reference(text: str) -> JobReference:
    """Parses a reference; raises JobError if it is malformed or names a missing file."""
    head, colon, tail = text.rpartition(":")
    place, name = (head, tail) if colon and tail.isidentifier() and head else (text, "")
    if place.endswith(".py"):
        return JobReference(place, name or "job", _existing(Path(place)))
    dotted = re.fullmatch(r"\w+(\.\w+)*", place) is not None
    if Path(place).is_file() or (Path(place).exists() and not dotted):
        raise JobError(f"{place} is not a Python file: give {_FORMS}")
    if dotted and name:
        return JobReference(place, name, None)
    if dotted:
        raise JobError(f"{place} is neither a .py file nor a module with a name: give {_FORMS}{_near(Path(place))}")
    raise JobError(f"{place} does not exist: give {_FORMS}{_near(Path(place))}")


def _existing(path: Path) -> Path:
    if path.is_file():
        return path.resolve()
    if path.is_dir():
        raise JobError(f"{path} is a folder: give {_FORMS}")
    raise JobError(f"{path} does not exist: check the path{_near(path)}")


def _near(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f" ({folder} does not exist either)"
    # Compared without the suffix, which would make any two names look similar.
    stems = sorted(found.stem for found in folder.glob("*.py"))
    matches = difflib.get_close_matches(path.stem, stems, n=3)
    return f"; similar files: {', '.join(str(folder / f'{match}.py') for match in matches)}" if matches else ""

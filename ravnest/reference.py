"""What `ravnest train JOB` may name: `path/to/file.py`, `file.py:name` or `package.module:name`.

Nothing is imported or run here, so that a name that leads nowhere is told at once.
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from ravnest.errors import JobError

_FORMS = "path/to/file.py, file.py:name or package.module:name"


@dataclass(frozen=True)
class JobReference:
    """A job by the place it is in and its name there."""

    place: str
    """The file as it was given, or the module's dotted name."""
    name: str
    path: Path | None
    """The file, where it is one."""

    @property
    def title(self) -> str:
        """What to call the job: `examples/digits/job.py` is best known by its folder."""
        if self.path is None:
            return self.place
        return self.path.parent.name if self.path.stem == "job" else self.path.stem


def parse_reference(text: str) -> JobReference:
    """The reference in `text`; JobError when it is none, or names a file that is not there."""
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
    # Without the suffix, which all have in common and which would make any two names look alike.
    stems = sorted(found.stem for found in folder.glob("*.py"))
    matches = difflib.get_close_matches(path.stem, stems, n=3)
    return f"; near it: {', '.join(str(folder / f'{match}.py') for match in matches)}" if matches else ""

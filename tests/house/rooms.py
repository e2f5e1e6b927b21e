"""Rooms that hold rooms, and the few modules that may stand in them directly."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.house.finding import Breach, python_files

DOORS: Final[Mapping[str, frozenset[str]]] = {"coordinator": frozenset({"__init__.py", "coordinator.py", "intake.py"})}
"""By the name of a room: its own modules. Every other one belongs into a room inside it."""


def breaches(package: Path) -> Iterator[Breach]:
    """Modules of the package that stand directly in a room which is divided into rooms."""
    for room, modules in DOORS.items():
        for path in python_files(package / room):
            if path.parent == package / room and path.name not in modules:
                yield Breach(path, 0, f"{room}/ holds only {', '.join(sorted(modules))}: move it into a room inside")

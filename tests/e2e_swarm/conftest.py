"""Machines for every test here."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.known_speed import speed_is_known
from tests.swarms.machines import Swarm


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    speed_is_known(tmp_path / "cache")
    # Six processes may be importing torch at once here.
    monkeypatch.setattr("tests.e2e.command.PATIENCE_SECONDS", 150.0)
    with ExitStack() as stack:
        yield Swarm(tmp_path, stack)

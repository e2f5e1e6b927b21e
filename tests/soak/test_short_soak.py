"""The short form of `make soak`: a minute of what takes two hours there."""

from pathlib import Path

import pytest

from tests.soak.soaking import soak

MINUTES = 0.6


@pytest.mark.timeout(420)
def test_no_process_grows_in_memory_open_files_or_threads(tmp_path: Path) -> None:
    # Not as fast as it can: others test meanwhile. What is kept of each microbatch shows all the same.
    seen = soak(tmp_path, MINUTES, max_a_second=40)
    growths = list(seen.growths())
    assert {found.process for found in growths} == {"coordinator", "provider-0", "provider-1"}
    assert [str(found) for found in growths if found.grows] == []
    assert seen.slowest_third() > 0.1, "it has come to a halt"

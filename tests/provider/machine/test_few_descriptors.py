"""A process that has no file descriptor left still knows how much memory it uses, and says what is wrong."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ravnest.errors import RunError
from ravnest.monitor.files import write_atomic
from ravnest.net.door.descriptors import raise_descriptor_limit
from ravnest.provider.machine.memory import available_bytes, peak_bytes, resident_bytes

CPU = torch.device("cpu")


@contextmanager
def no_descriptor_left() -> Iterator[int]:
    """Fills the table of open files of this process, whose limit is lowered for that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = max(map(int, os.listdir("/dev/fd"))) + 16
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    taken = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield low
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_known_of_the_memory_holds_while_nothing_can_be_read() -> None:
    before = resident_bytes(), peak_bytes(CPU), available_bytes(CPU)
    with no_descriptor_left():
        now = resident_bytes(), peak_bytes(CPU), available_bytes(CPU)
    assert now[:2] == before[:2] and now[2] > 0


def test_what_cannot_be_written_then_is_told_with_the_limit_and_how_to_raise_it(tmp_path: Path) -> None:
    with no_descriptor_left() as limit, pytest.raises(RunError) as refused:
        write_atomic(tmp_path / "summary.json", "{}")
    assert f"({limit})" in str(refused.value) and "ulimit -n" in str(refused.value)
    assert "`ulimit -n 65536`" in str(refused.value)


def test_the_limit_of_a_process_is_raised_as_far_as_the_system_lets_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
        assert raise_descriptor_limit() == min(hard, 65_536)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 65_536), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

"""Memory of a machine as a provider counts it."""

from pathlib import Path

import pytest
import torch

from ravnest.provider.machine.memory import (
    available_bytes,
    forget_peak,
    group_bytes,
    lent_bytes,
    peak_bytes,
    resident_bytes,
)

CPU = torch.device("cpu")


def test_memory_is_what_there_is_and_no_more_than_was_lent(tmp_path: Path) -> None:
    assert lent_bytes(8 << 30, None) == 8 << 30
    assert lent_bytes(8 << 30, 2 << 30) == 2 << 30
    assert lent_bytes(8 << 30, 64 << 30) == 8 << 30
    assert group_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert group_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("5000\n")
    assert group_bytes(tmp_path) == 4000


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone can forget a peak")
def test_a_peak_can_be_forgotten() -> None:
    block = torch.ones(128 << 18)
    before = peak_bytes(CPU)
    del block
    forget_peak(CPU)
    assert peak_bytes(CPU) < before - (64 << 20)


def test_memory_is_what_the_system_counts() -> None:
    cpu = torch.device("cpu")
    assert 0 < resident_bytes() <= peak_bytes(cpu)
    assert available_bytes(cpu) > 0

"""That memory ran out is known for what it is, whatever torch calls it."""

import pytest
import torch

from ravnest.engine.out_of_memory import asked_bytes, is_out_of_memory, told


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (MemoryError(), None),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total"), 3 << 29),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                "to allocate 4096000 bytes. Error code 12 (Cannot allocate memory)"
            ),
            4_096_000,
        ),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), None),
        (OSError(12, "Cannot allocate memory"), None),
    ],
)
def test_an_error_for_want_of_memory_is_told_as_such(error: Exception, asked: int | None) -> None:
    assert is_out_of_memory(error) and asked_bytes(error) == asked
    assert told(error).startswith("memory ran out")


def test_torch_says_so_itself_when_it_cannot_have_what_it_asks_for() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 55)
    assert is_out_of_memory(raised.value)
    assert asked_bytes(raised.value) == 1 << 57


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("out of memory"), OSError(2, "no")])
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not is_out_of_memory(error)

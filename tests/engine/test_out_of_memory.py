"""Errors that mean that memory ran out are recognized, however torch words them."""

import pytest
import torch

from ravnest.engine.out_of_memory import is_out_of_memory, out_of_memory_text, requested_bytes
from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.errors import LentMemoryError
from ravnest.graph.portable import Node, PortableGraph, Ref, ValueSpec, WeightSpec
from ravnest.spec import OptimizerSpec


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
def test_errors_for_lack_of_memory_are_recognized(error: Exception, asked: int | None) -> None:
    assert is_out_of_memory(error) and requested_bytes(error) == asked
    assert out_of_memory_text(error).startswith("memory ran out")


def test_an_allocation_that_fails_in_torch_is_recognized() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 55)
    assert is_out_of_memory(raised.value)
    assert requested_bytes(raised.value) == 1 << 57


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("out of memory"), OSError(2, "no")])
def test_other_errors_are_not_recognized(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_a_stage_that_would_exceed_its_memory_raises_and_stays_usable() -> None:
    doubled = [Node(f"n{i}", "aten.cat.default", ((Ref(f"n{i - 1}" if i else "h"),) * 2,)) for i in range(30)]
    graph = PortableGraph(
        nodes=(
            Node("h", "aten.mul.Tensor", (Ref("x"), Ref("w"))),
            *doubled,
            Node("loss", "aten.mean.default", (Ref("n29"),)),
        ),
        inputs=(ValueSpec("x", torch.float32, ("b", 4)),),
        parameters=(WeightSpec("w", "w", torch.float32, (4,)),),
        loss="loss",
    )
    settings = StageSettings(optimizer=OptimizerSpec("SGD", {"lr": 0.1}).to_json())
    stage = Stage(graph, {"w": torch.ones(4)}, settings, memory_bytes=64 << 20)
    with pytest.raises(LentMemoryError, match=r"node 'n\d+' \(aten.cat.default\) would take the stage to") as raised:
        stage.forward(0, {"x": torch.ones(2, 4)})
    assert is_out_of_memory(raised.value)
    assert out_of_memory_text(raised.value) == "memory ran out"
    assert stage.in_flight == 0

"""A stage's part of a checkpoint holds that stage's state: all of it, nothing of another stage, and not without end."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch

from ravnest.coordinator.checkpoints.part_check import BadPartError, StagePart
from ravnest.graph.weights import stream_tensors
from tests.coordinator.checkpoints.part_states import GRAPH, a_state

PART = StagePart.of(1, GRAPH)


def check(folder: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    path = folder / "part-1.safetensors"
    path.write_bytes(b"".join(stream_tensors(tensors, metadata)))
    PART.check(path)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adafactor", "ASGD", "Rprop"])
def test_what_a_stage_saves_is_taken(tmp_path: Path, optimizer: str) -> None:
    tensors, metadata = a_state(optimizer)
    assert len(b"".join(stream_tensors(tensors, metadata))) < PART.max_bytes
    check(tmp_path, tensors, metadata)


def test_what_the_outer_optimizer_remembers_of_a_parameter_is_taken_too(tmp_path: Path) -> None:
    tensors, metadata = a_state()
    check(tmp_path, {**tensors, "outer:layer.weight": torch.zeros(4, 4)}, metadata)


def the_outer_state_of_another_stage(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors["outer:other.weight"] = torch.zeros(4, 4)


def an_outer_state_of_another_shape(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors["outer:layer.weight"] = torch.zeros(4, 5)


def of_another_stage(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors["param:other.weight"] = torch.zeros(4, 4)


def a_buffer_of_another_stage(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors["buffer:layer.weight"] = torch.zeros(4, 4)


def the_optimizer_of_another_stage(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors["optim:other.weight:step"] = torch.zeros(())


def plain_values_of_another_stage(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    metadata["optimizer"] = json.dumps({"values": {"other.weight:step": 7}, "groups": []})


def another_shape(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors["param:layer.weight"] = torch.zeros(4, 5)


def another_type(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors["param:layer.weight"] = torch.zeros(4, 4).double()


def nothing(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    tensors.clear()


def no_values(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    metadata.clear()


def values_that_are_none(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    metadata["optimizer"] = "[" * 100_000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (of_another_stage, "holds 'param:other.weight', which is not that stage's"),
        (a_buffer_of_another_stage, "holds 'buffer:layer.weight', which is not that stage's"),
        (the_optimizer_of_another_stage, "holds 'optim:other.weight:step', which is not that stage's"),
        (plain_values_of_another_stage, "holds 'optim:other.weight:step', which is not that stage's"),
        (the_outer_state_of_another_stage, "holds 'outer:other.weight', which is not that stage's"),
        (an_outer_state_of_another_shape, r"has outer:layer.weight as F32 of the shape \(4, 5\), which is"),
        (another_shape, r"has param:layer.weight as F32 of the shape \(4, 5\), which is torch.float32 of \(4, 4\)"),
        (another_type, "has param:layer.weight as F64"),
        (nothing, "lacks 'param:layer.weight'"),
        (no_values, "cannot be used: KeyError: 'optimizer'"),
        (values_that_are_none, "cannot be used: ValueError"),
    ],
)
def test_what_is_not_the_stages_own_is_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], None], words: str
) -> None:
    tensors, metadata = a_state()
    change(tensors, metadata)
    with pytest.raises(BadPartError, match=f"the part of stage 1 {words}"):
        check(tmp_path, tensors, metadata)


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"\xff" * 1000])
def test_what_is_no_part_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "part").write_bytes(data)
    with pytest.raises(BadPartError, match="the part of stage 1 cannot be used"):
        PART.check(tmp_path / "part")


def test_an_upload_without_end_is_refused_as_soon_as_it_is_too_large() -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 20
            yield bytes(1 << 20)

    async def take() -> None:
        async for _ in PART.bounded(endless()):
            pass

    with pytest.raises(BadPartError, match=re.escape(f"more than the {PART.max_bytes} bytes its state can need")):
        asyncio.run(take())
    assert PART.max_bytes < sent <= PART.max_bytes + (1 << 20)

"""The fused model has the user's own names and loads into the user's own model."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ravnest.errors import RunError
from ravnest.monitor.export import fuse, write_model


@dataclass(frozen=True)
class Contents:
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.register_buffer("table", torch.arange(4))


def test_a_tied_model_loads_what_was_fused(tmp_path: Path) -> None:
    torch.manual_seed(1)
    trained = Tied()
    buffers = dict(trained.named_buffers())
    table = {"table": buffers.pop("table")}
    contents = Contents(dict(trained.named_parameters()), buffers)
    fused = fuse(contents, {"head.weight": "embed.weight"}, table, non_persistent=["mask"])
    write_model(tmp_path / "model.safetensors", fused, {"updates": "3"})
    torch.manual_seed(2)
    fresh = Tied()
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for name, tensor in trained.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name
    assert fresh.head.weight is fresh.embed.weight
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_what_was_trained_wins_over_what_was_not() -> None:
    contents = Contents({"w": torch.ones(1)}, {})
    assert fuse(contents, {}, {"w": torch.zeros(1)})["w"].item() == 1.0


def test_a_missing_owner_is_named() -> None:
    with pytest.raises(RunError, match=r"lacks 'embed.weight', which 'head.weight' is tied to"):
        fuse(Contents({}, {}), {"head.weight": "embed.weight"}, {})


def test_a_full_disk_keeps_the_old_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_model(path, {"w": torch.ones(1)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(RunError, match="cannot write"):
            write_model(path, {"w": torch.ones(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.equal(load_file(path)["w"], torch.ones(1))
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_the_model_is_readable_for_the_users_that_can_read_the_run(tmp_path: Path) -> None:
    (tmp_path / "summary.json").touch()
    write_model(tmp_path / "model.safetensors", {"w": torch.ones(1)})
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "summary.json").stat().st_mode

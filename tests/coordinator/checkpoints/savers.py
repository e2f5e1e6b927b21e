"""Savers of checkpoints, and the stages whose parts they wait for."""

from pathlib import Path

import torch

from ravnest.coordinator.checkpoints.part_check import StagePart
from ravnest.coordinator.checkpoints.saver import Saver
from ravnest.coordinator.checkpoints.store import CheckpointStore
from ravnest.graph.portable import PortableGraph, WeightSpec
from ravnest.settings import Checkpoint


def stages() -> dict[int, StagePart]:
    return {
        n: StagePart.of(n, PortableGraph((), parameters=(WeightSpec("w", f"layer{n}", torch.float32, (3,)),)))
        for n in range(2)
    }


def a_saver(folder: Path, settings: Checkpoint | None = None, updates: int = 0) -> Saver:
    return Saver(CheckpointStore(folder, keep=2), settings or Checkpoint(), stages(), {"aliases": {}}, updates)

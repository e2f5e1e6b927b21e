"""Common part of the peers' member processes: the model, its data, the pace, and the report of each step.

A member gets its place as one JSON argument. It needs torch alone, so that it also runs where Ravnest is not installed.
Each member holds the whole model and trains on data of its own.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.homes_parts.models import BATCH, MODELS, RATE


@dataclass(frozen=True, slots=True)
class Place:
    """What a member is told on its command line."""

    index: int
    count: int
    host: str
    """Its own address."""
    folder: str
    """Folder that all members share."""
    model: str
    slower: float
    """How many times slower than it is this machine pretends to be."""
    inner_steps: int
    """Steps of each member between two averagings."""
    averaging_seconds: float
    """Twice the time that one averaging should take on the slowest line."""

    def text(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


def my_place() -> Place:
    """The place given on the command line. Also limits torch to one thread."""
    torch.set_num_threads(1)
    return Place(**json.loads(sys.argv[1]))


def steps_path(folder: Path, index: int) -> Path:
    """File with one line for each step of a member."""
    return folder / f"steps-{index}.jsonl"


def build(place: Place) -> tuple[nn.Module, list[nn.Parameter]]:
    model = MODELS[place.model].made()
    return model, list(model.parameters())


def adamw(parameters: list[nn.Parameter], slower: float) -> torch.optim.AdamW:
    """The optimizer of our own run in its fastest form, on a machine that is slower by this factor."""
    optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True)
    began: list[float] = []

    def before(*_: object) -> None:
        began[:] = [time.perf_counter()]

    def after(*_: object) -> None:
        time.sleep((slower - 1) * (time.perf_counter() - began[0]))

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


def train(place: Place, model: nn.Module, step: Callable[[], None], averaged: Callable[[], int]) -> None:
    """Train until the process is killed. `step` applies the gradients, and may average; `averaged` is the number of
    averagings so far."""
    task = MODELS[place.model]
    with steps_path(Path(place.folder), place.index).open("w") as file:
        for tokens, classes in task.batches(1000 + place.index):
            began = time.perf_counter()
            model.zero_grad()
            loss: Tensor = task.loss(model(tokens), classes)
            loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
            time.sleep((place.slower - 1) * (time.perf_counter() - began))
            step()
            line = {"at": time.time(), "samples": BATCH, "loss": float(loss.detach()), "averaged": averaged()}
            file.write(json.dumps(line) + "\n")
            file.flush()

"""One cluster of three stages, without a network: how Ravnest trains a model that no single machine holds.

    python examples/one_cluster.py

cuts one model in three, gives each part to a stage, and passes microbatches through them as three providers would. Each
stage updates its weights as soon as a gradient arrives and waits for no other stage. A microbatch can therefore meet
newer weights on its way back than on its way forward: the updates in between are its staleness, printed for the first,
the second and the last stage. In a swarm each stage runs on a machine of its own (`ravnest/engine/worker.py`), and the
values cross links (`ravnest/net`).
"""

from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.graph.capture.capture import capture
from ravnest.graph.layout import layout
from ravnest.graph.partition import split
from ravnest.spec import OptimizerSpec

STAGES, IN_FLIGHT, MICROBATCHES = 3, 3, 60

# The requester: one model, one loss, batches of (inputs, targets).
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
inputs = torch.randn(MICROBATCHES, 16, 8)
batches = [(each, each[:, :4].argmax(dim=1)) for each in inputs]

# Capture turns the model and its loss into one portable graph: data, no code. The graph is cut at two places.
captured = capture(model, F.cross_entropy, {}, batches[:2])
cuts = layout(captured.graph).cuts[1::2][: STAGES - 1]
optimizer = OptimizerSpec("SGD", {"lr": 0.2}).to_json()
stages = []
for number, graph in enumerate(split(captured.graph, cuts)):
    settings = StageSettings(optimizer=optimizer, stage=number, stages=STAGES, in_flight=IN_FLIGHT)
    stages.append(Stage(graph, {spec.key: captured.weights[spec.key].clone() for spec in graph.weights}, settings))


def needed(stage: Stage, microbatch: int, received: dict[str, Any]) -> dict[str, Any]:
    """What a stage computes with: its share of the batch, and the activations of the stage before."""
    values = {**dict(zip(("inputs", "targets"), batches[microbatch], strict=True)), **received}
    return {value.name: values[value.name] for value in (*stage.graph.inputs, *stage.graph.receives)}


def train() -> tuple[list[float], list[list[int]]]:
    """Trains on every microbatch; returns the losses, and of each stage the staleness of its updates."""
    losses: list[float] = []
    staleness: list[list[int]] = [[] for _ in stages]
    forwards: list[deque[tuple[int, Any]]] = [deque() for _ in stages]
    backwards: list[deque[tuple[int, Any]]] = [deque() for _ in stages]
    forwards[0].extend((microbatch, {}) for microbatch in range(MICROBATCHES))
    while any(forwards) or any(backwards):
        for number, stage in enumerate(stages):  # In one tick every stage does one piece of work, a backward first.
            if backwards[number]:
                microbatch, gradients = backwards[number].popleft()
                sent = stage.backward(microbatch, gradients)
                update = stage.update(microbatch)
                assert update is not None  # Gradients of several microbatches are summed only with `accumulate`.
                staleness[number].append(update.staleness)
                if number:
                    backwards[number - 1].append((microbatch, sent))
                elif microbatch % 10 == 9:
                    latest = ", ".join(str(each[-1]) for each in staleness)
                    print(f"microbatch {microbatch + 1}: loss {losses[microbatch]:.3f}, staleness {latest}")
            elif forwards[number] and (number or stage.in_flight < IN_FLIGHT):
                microbatch, received = forwards[number].popleft()
                values = stage.forward(microbatch, needed(stage, microbatch, received))
                if number + 1 < STAGES:
                    forwards[number + 1].append((microbatch, values))
                else:
                    losses.append(float(values[str(stage.graph.loss)]))
                    backwards[number].append((microbatch, None))
    return losses, staleness


if __name__ == "__main__":
    train()

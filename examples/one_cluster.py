"""One cluster of three stages without a network: how Ravnest trains a model that no single machine holds.

    python examples/one_cluster.py

The requester captures a model as a portable graph and cuts the graph into three parts. Each part becomes a stage, which
in a swarm runs on a machine of its own (`ravnest/engine/worker.py`) and exchanges values over links (`ravnest/net`).
A stage updates its weights as soon as a gradient arrives and never waits for the other stages. A microbatch can
therefore meet newer weights in its backward than in its forward: the updates in between are its staleness. The program
prints the loss, and the staleness at each of the three stages.
"""

from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.graph.capture.capture import capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.spec import OptimizerSpec

STAGES, IN_FLIGHT, MICROBATCHES = 3, 3, 60
Batches = list[dict[str, torch.Tensor]]


def train() -> tuple[list[float], list[list[int]]]:
    """Trains on every microbatch; returns the losses, and for each stage the staleness of its updates."""
    stages, batches = cut_model()
    losses: list[float] = []
    staleness: list[list[int]] = [[] for _ in stages]
    forwards: list[deque[tuple[int, Any]]] = [deque() for _ in stages]  # Activations that wait at each stage,
    backwards: list[deque[tuple[int, Any]]] = [deque() for _ in stages]  # and gradients, with their microbatches.
    forwards[0].extend((microbatch, {}) for microbatch in range(MICROBATCHES))
    while any(forwards) or any(backwards):
        for number, stage in enumerate(stages):  # In each turn every stage runs one task, a backward first.
            if backwards[number]:
                microbatch, gradients = backwards[number].popleft()
                sent = stage.backward(microbatch, gradients)
                if update := stage.update(microbatch):
                    staleness[number].append(update.staleness)
                if number:
                    backwards[number - 1].append((microbatch, sent))
                elif microbatch % 10 == 9:
                    latest = ", ".join(str(each[-1]) for each in staleness)
                    print(f"microbatch {microbatch + 1}: loss {losses[microbatch]:.3f}, staleness {latest}")
            elif forwards[number] and (number or stage.in_flight < IN_FLIGHT):
                microbatch, received = forwards[number].popleft()
                values = stage.forward(microbatch, inputs_of(stage, {**batches[microbatch], **received}))
                if number + 1 < STAGES:
                    forwards[number + 1].append((microbatch, values))
                else:  # The last stage computes the loss, and its backward follows at once.
                    losses.append(float(values[str(stage.graph.loss)]))
                    backwards[number].append((microbatch, None))
    return losses, staleness


def cut_model() -> tuple[list[Stage], Batches]:
    """A small model as three stages, and the microbatches to train it on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    batches = [{"inputs": each, "targets": each[:, :4].argmax(dim=1)} for each in torch.randn(MICROBATCHES, 16, 8)]
    captured = capture(model, F.cross_entropy, {}, [tuple(each.values()) for each in batches[:2]])
    graphs = split(captured.graph, layout(captured.graph).cuts[1::2][: STAGES - 1])
    stages = []
    for number, graph in enumerate(graphs):
        weights = {spec.key: captured.weights[spec.key].clone() for spec in graph.weights}
        optimizer = OptimizerSpec("SGD", {"lr": 0.2}).to_json()
        settings = StageSettings(optimizer=optimizer, stage=number, stages=STAGES, in_flight=IN_FLIGHT)
        stages.append(Stage(graph, weights, settings))
    return stages, batches


def inputs_of(stage: Stage, values: dict[str, Any]) -> dict[str, Any]:
    """The values that the stage's graph takes: its part of the batch, and the activations of the stage before."""
    return {value.name: values[value.name] for value in (*stage.graph.inputs, *stage.graph.receives)}


if __name__ == "__main__":
    train()

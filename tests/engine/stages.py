"""Stages of a captured model, and an outbox that ignores what it is given, as a base for those of tests."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ravnest.engine.messages import LossRecord, Message, Snapshot
from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage, Update
from ravnest.engine.telemetry.spans import Span
from ravnest.graph.capture.capture import Captured
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.graph.portable import PortableGraph
from ravnest.spec import OptimizerSpec


def cut_after_layers(captured: Captured, stages: int) -> Sequence[PortableGraph]:
    """The graphs of this many stages of a sequence of layers, each with a layer that has parameters."""
    return split(captured.graph, layout(captured.graph).cuts[1::2][: stages - 1])


def stages_of(
    captured: Captured, graphs: Sequence[PortableGraph], optimizer: OptimizerSpec, **settings: Any
) -> list[Stage]:
    """A stage for each graph, with copies of the captured weights."""
    stages = []
    for number, graph in enumerate(graphs):
        weights = {spec.key: captured.weights[spec.key].clone() for spec in graph.weights}
        told = StageSettings(optimizer=optimizer.to_json(), stage=number, stages=len(graphs), **settings)
        stages.append(Stage(graph, weights, told))
    return stages


class SilentOutbox:
    def forward(self, message: Message) -> None: ...
    def backward(self, message: Message) -> None: ...
    def trained(self, loss: LossRecord) -> None: ...
    def updated(self, update: Update) -> None: ...
    def worked(self, span: Span) -> None: ...
    def done(self, message: Message) -> None: ...
    def evaluated(self, message: Message) -> None: ...
    def save(self, checkpoint: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None: ...
    def keep(self, replica: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None: ...
    def snapshot(self, snapshot: Snapshot) -> None: ...
    def failed(self, kind: str, text: str, microbatch: int | None) -> None: ...

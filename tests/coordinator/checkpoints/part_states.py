"""States of one stage as parts of a checkpoint."""

import torch

from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.graph.portable import Node, PortableGraph, Ref, ValueSpec, WeightSpec
from ravnest.spec import OptimizerSpec

GRAPH = PortableGraph(
    nodes=(
        Node("h", "aten.linear.default", (Ref("inputs"), Ref("w"))),
        Node("loss", "aten.mse_loss.default", (Ref("h"), Ref("targets"))),
    ),
    inputs=(ValueSpec("inputs", torch.float32, ("s0", 4)), ValueSpec("targets", torch.float32, ("s0", 4))),
    parameters=(WeightSpec("w", "layer.weight", torch.float32, (4, 4)),),
    loss="loss",
)


def a_state(optimizer: str = "AdamW") -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The state of a real stage after an update."""
    settings = StageSettings(optimizer=OptimizerSpec(optimizer, {"lr": 0.1}).to_json())
    stage = Stage(GRAPH, {"layer.weight": torch.ones(4, 4)}, settings, torch.device("cpu"))
    stage.forward(0, {"inputs": torch.rand(2, 4), "targets": torch.rand(2, 4)})
    stage.backward(0, None)
    stage.update(0)
    return stage.state()

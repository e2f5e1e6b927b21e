"""The stages of a model, driven by hand: the results of each stage go to the next one."""

from typing import Any

import torch

from ravnest.graph.cutting.partition import max_stages, split
from ravnest.spec import OptimizerSpec
from tests.engine.stages import stages_of
from tests.exactness.plain_loop import copied
from tests.graph.cutting import even_places, example

SGD = OptimizerSpec("SGD", {"lr": 0.05})
ADAM = OptimizerSpec("Adam", {"lr": 2e-3})


class Line:
    def __init__(self, name: str, stages: int, optimizer: OptimizerSpec = SGD, **settings: Any) -> None:
        self.example = example(name)
        found = self.example.captured
        graphs = split(found.graph, even_places(found.graph, min(stages, max_stages(found.graph))))
        self.stages = stages_of(found, graphs, optimizer, **settings)
        self.sent: list[dict[str, torch.Tensor]] = []
        """The gradients that were sent between stages, in order."""

    def forward(self, microbatch: int) -> torch.Tensor:
        """The loss."""
        made = self.example.made
        batch = copied(made.batches[microbatch % len(made.batches)])
        fed = self.example.captured.structure.flatten(batch)
        leaf = self.stages[-1]
        values: dict[str, Any] = {}
        if leaf.graph.lookups:
            values = leaf.look_up(microbatch, {v.name: fed[v.name] for v in leaf.graph.inputs})
        for stage in self.stages:
            needed = {v.name for v in (*stage.graph.inputs, *stage.graph.from_stages)}
            given = {name: value for name, value in {**fed, **_received(values)}.items() if name in needed}
            values = stage.forward(microbatch, given)
        loss = values[str(self.stages[-1].graph.loss)]
        assert isinstance(loss, torch.Tensor)
        return loss

    def backward(self, microbatch: int, **more: Any) -> None:
        gradients: dict[str, torch.Tensor] | None = None
        for stage in reversed(self.stages):
            gradients = stage.backward(microbatch, gradients)
            self.sent.append({name: gradient.clone() for name, gradient in gradients.items()})
            stage.finish_backward()
            if not stage.graph.lookups:
                stage.update(microbatch, **more)
        leaf = self.stages[-1]
        if leaf.graph.lookups:
            leaf.add_row_gradients(microbatch, gradients or {})
            leaf.update(microbatch, **more)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor for stage in self.stages for name, tensor in stage.state_tensors().items()}


def same(one: Line, other: Line) -> None:
    have, want = one.state(), other.state()
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(have[name], tensor), name
    assert len(one.sent) == len(other.sent)
    for mine, theirs in zip(one.sent, other.sent, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], gradient) for name, gradient in theirs.items())


def _received(values: dict[str, Any]) -> dict[str, Any]:
    """Copies, like values that arrive from the network."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}

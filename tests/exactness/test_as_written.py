"""Models that change gradients, draw numbers or freeze parts of themselves train in a swarm as they are written.

Each is trained over two real provider processes with one microbatch in flight, and compared with a plain loop over the
user's own model. The loop leaves the modes of the modules as the user set them.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from ravnest import Job, Pipeline
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from tests.exactness.plain_loop import kept_generator, replayed_draws, worst_difference
from tests.odd_models import DropsPaths, Hooked, OwnBackwards, ThreeLayers

Tensor = torch.Tensor
TOLERANCE = 1e-6


class Sampled(ThreeLayers):
    """A variational bottleneck, which draws in evaluation too, next to a dropout that does not."""

    def forward(self, x: Tensor) -> Tensor:
        mean = F.dropout(self.a(x), 0.2, self.training)
        return self.c(mean + torch.randn_like(mean) * torch.exp(0.1 * self.b(x)))


class Normed(ThreeLayers):
    """Two batch norms and two dropouts; the first of each is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(8)])
        self.drops = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.5)])
        self.norms[0].running_var.fill_(2.0)  # type: ignore[union-attr, operator]
        self.norms[0].eval()
        self.drops[0].eval()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drops[0](self.norms[0](self.a(x)))
        return self.c(self.drops[1](self.norms[1](self.b(hidden))))


@pytest.mark.parametrize("build", [OwnBackwards, Hooked, DropsPaths, Sampled, Normed])
def test_two_stages_train_it_as_a_plain_loop_does(
    swarm: EmbeddedSwarm, tmp_path: Path, build: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(7)
    model = build()
    batches = [(torch.randn(6, 8), torch.randn(6, 8)) for _ in range(12)]
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    job = Job(
        model=model,
        loss=F.mse_loss,
        train_data=batches,
        eval_data=batches[:2],
        optimizer=optimizer,
        pipeline=Pipeline(in_flight=1),
    )
    result = swarm.train(job, providers=2, run=tmp_path, display=False)
    assert result.model is not None
    trained = load_file(result.model)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _train(model, batches, optimizer)
    worst, where = worst_difference(trained, model.state_dict())
    assert worst <= TOLERANCE, f"{where} is off by {worst:.1e}"
    moved = [name for name, _ in model.named_parameters() if not torch.equal(trained[name], start[name])]
    assert set(moved) == {name for name, _ in model.named_parameters()}, "a model that does not learn shows nothing"
    if build is Normed:
        assert torch.equal(trained["norms.0.running_var"], start["norms.0.running_var"])
    if build is not Sampled:
        assert result.summary.eval is not None
        assert result.summary.eval["loss"] == pytest.approx(_evaluated(model, batches[:2]), rel=1e-5)


def _train(model: nn.Module, batches: list[tuple[Tensor, Tensor]], optimizer: Any) -> None:
    stepper = optimizer(model.parameters())
    with kept_generator():
        for number, (inputs, targets) in enumerate(batches):
            with replayed_draws(0, number):
                loss = F.mse_loss(model(inputs.clone()), targets)
            loss.backward()
            stepper.step()
            stepper.zero_grad()


def _evaluated(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    model.eval()
    with torch.no_grad():
        losses = [float(F.mse_loss(model(inputs.clone()), targets)) for inputs, targets in batches]
    return sum(losses) / len(losses)

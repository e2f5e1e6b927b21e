"""A loss that is not finite for a reason of the user's own: where it arose and what to do about it are named."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.errors import TrainingError
from tests.e2e.jobs import CLASSES, FEATURES, a_job, batches
from tests.e2e.tied_jobs import SteepRows, a_tied_model, next_token_loss, token_batch


class Logarithm(nn.Module):
    """Takes the logarithm of what a ReLU has made zero, in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(features).relu()).relu().log())


class Root(nn.Module):
    """The square root of 0: finite itself, and its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        found = self.middle(self.first(features))
        return self.last(found + (0 * found).sqrt())


@pytest.mark.parametrize(
    ("model", "rate", "words"),
    [
        (
            Logarithm,
            1e-2,
            ("is nan: it arose in stage", "the operator log (", "keep its inputs inside its domain"),
        ),
        (Root, 1e-2, ("the gradients became not finite in stage", "such as sqrt (", "no finite gradient")),
        (None, 1e30, ("it arose in stage", "training has diverged; lower the learning rate")),
    ],
    ids=["a logarithm of zero", "a square root of zero", "a learning rate that explodes"],
)
def test_where_it_arose_is_named_and_what_to_do(
    model: type[nn.Module] | None, rate: float, words: tuple[str, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    changes = {} if model is None else {"model": model()}
    job = a_job(batches([8] * 12), optimizer=partial(torch.optim.SGD, lr=rate), **changes)
    with EmbeddedSwarm(3) as swarm, pytest.raises(TrainingError) as caught:
        swarm.train(job, run=tmp_path / "run", display=False)
    said = str(caught.value)
    assert all(word in said for word in words), said
    assert "provider-" in said


def test_gradients_of_looked_up_rows_are_traced_from_the_leaf_to_the_root_that_computed_them(tmp_path: Path) -> None:
    data = [token_batch(seed) for seed in range(12)]
    job = a_job(data, model=a_tied_model(SteepRows), loss=next_token_loss)
    with EmbeddedSwarm(3) as swarm, pytest.raises(TrainingError) as caught:
        swarm.train(job, providers=3, clusters=1, run=tmp_path / "run", display=False)
    said = str(caught.value)
    assert "the gradients became not finite in stage 0" in said and "such as sqrt (" in said, said

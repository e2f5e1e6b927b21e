"""A provider whose frames do not fit the microbatch that everybody else was told of: real processes and lines.

It is named, it gets no stage any more, and the run goes on to its end without it.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ravnest import Job, Pipeline
from tests.adversary.lying_swarm import events, lying_swarm
from tests.e2e.watching import adds_up

STEPS, FEATURES, CLASSES = 5, 6, 3


class Sequences(nn.Module):
    """An LSTM between two layers: its kernels do not check that what they get is of one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(FEATURES, 12)
        self.lstm = nn.LSTM(12, 12, batch_first=True)
        self.after = nn.Linear(12, CLASSES)

    def forward(self, steps: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
        state = begin.unsqueeze(0)
        found, _ = self.lstm(self.before(steps).relu(), (state, state.clone()))
        return self.after(found[:, -1])


def sequences(count: int) -> list[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def one(size: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        steps = torch.randn(size, STEPS, FEATURES, generator=generator)
        return (steps, torch.zeros(size, 12)), steps[:, -1, :CLASSES].argmax(dim=1)

    return [one(8 if number % 2 else 5) for number in range(count)]


def a_job(count: int = 24) -> Job:
    torch.manual_seed(0)
    return Job(
        model=Sequences(),
        loss=F.cross_entropy,
        train_data=sequences(count),
        eval_data=sequences(2),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        pipeline=Pipeline(in_flight=2),
    )


@pytest.mark.parametrize(
    ("liar", "lie", "words"),
    [
        ("provider-0", "activations of a smaller batch", "do not fit its feed"),
        ("provider-1", "activations of a smaller batch", "do not fit its feed"),
        ("provider-1", "another number of samples", "have samples"),
        ("provider-2", "gradients of a smaller batch", "the gradient of"),
    ],
)
def test_who_sends_what_does_not_fit_the_microbatch_is_named_and_the_run_goes_on(
    liar: str, lie: str, words: str, tmp_path: Path
) -> None:
    with lying_swarm(3, liar, lie, first=4) as swarm:
        result = swarm.train(a_job(), run=tmp_path / "run", display=False)
    assert result.summary.status == "finished" and adds_up(result, 24)
    broken = events(tmp_path / "run", "rules_broken")
    assert [event["provider"] for event in broken] == [liar] and words in broken[0]["reason"], broken
    assert {fault.provider for fault in result.summary.faults} == {liar}
    honest = {stage.provider for cluster in result.summary.clusters for stage in cluster.stages}
    assert liar not in honest and len(honest) == 2

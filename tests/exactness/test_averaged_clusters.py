"""Clusters that average while nothing is in flight are what a plain loop over copies of the model is."""

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from ravnest import Averaging, Job, Pipeline
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from tests.e2e.jobs import CLASSES, FEATURES, Batch, batches

EVERY = 3
"""Microbatches between two rounds."""

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def a_model() -> nn.Module:
    """With statistics to be averaged and a counter, of which the largest counts."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)
    )


def trained_by(run: Path) -> dict[int, int]:
    """Which cluster each microbatch went to, as its root reported it."""
    lines = [json.loads(line) for line in (run / "updates.jsonl").read_text().splitlines()]
    return {line["microbatch"]: line["cluster"] for line in lines if line["stage"] == 0}


def averaged(models: dict[int, nn.Module], samples: dict[int, int]) -> dict[str, torch.Tensor]:
    total = sum(samples.values())
    states = {number: model.state_dict() for number, model in models.items()}
    mean: dict[str, torch.Tensor] = {}
    for name, tensor in next(iter(states.values())).items():
        if tensor.is_floating_point():
            mean[name] = sum(
                (states[n][name].double() * count / total for n, count in samples.items()), torch.tensor(0)
            )
        else:
            mean[name] = torch.stack([state[name] for state in states.values()]).max()
    return mean


class Outer:
    """Nesterov's step on the mean of the trained parameters, in float64; without momentum the mean itself."""

    def __init__(self, model: nn.Module, momentum: float) -> None:
        self._momentum = momentum
        self._anchor = {name: p.detach().double() for name, p in model.named_parameters()}
        self._velocity = {name: torch.zeros_like(p) for name, p in self._anchor.items()}

    def step(self, mean: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, anchor in self._anchor.items():
            difference = mean[name] - anchor
            velocity = self._velocity[name] = self._momentum * self._velocity[name] + difference
            self._anchor[name] = anchor + difference + self._momentum * velocity
        return {**mean, **self._anchor}


def plain_loop(
    data: list[Batch], clusters: int, who: dict[int, int], stepper: Any = SGD, momentum: float = 0.0
) -> nn.Module:
    models = {number: a_model() for number in range(clusters)}
    steppers = {number: stepper(model.parameters()) for number, model in models.items()}
    since, outer = dict.fromkeys(models, 0), Outer(models[0], momentum)
    for number, (inputs, targets) in enumerate(data):
        if number and number % EVERY == 0:
            mean = outer.step(averaged(models, since))
            for model in models.values():
                model.load_state_dict(copy.deepcopy(mean))
            since = dict.fromkeys(models, 0)
        cluster = who[number]
        steppers[cluster].zero_grad()
        F.cross_entropy(models[cluster](inputs), targets).backward()
        steppers[cluster].step()
        since[cluster] += len(targets)
    models[0].load_state_dict(outer.step(averaged(models, since)))
    return models[0]


@pytest.mark.parametrize(("clusters", "providers"), [(2, 4), (2, 3), (3, 4)])
def test_clusters_that_wait_for_their_rounds_are_copies_that_are_averaged(
    swarm: EmbeddedSwarm, tmp_path: Path, clusters: int, providers: int
) -> None:
    data = batches([8, 8, 5, 8, 8, 3, 8, 8, 8, 8, 8, 6])
    samples = sum(len(targets) for _, targets in data[:EVERY])
    job = Job(
        model=a_model(),
        loss=F.cross_entropy,
        train_data=data,
        optimizer=SGD,
        # One sample less than the rounds' share: the number of samples in a microbatch is no whole part of it.
        averaging=Averaging(every=samples - 2, blocking=True, rate_factor=1.0),
        pipeline=Pipeline(in_flight=1, record_updates=True),
    )
    result = swarm.train(job, providers=providers, clusters=clusters, run=tmp_path / "run", display=False)
    assert result.summary.averaging.rounds == len(data) // EVERY
    who = trained_by(tmp_path / "run")
    assert set(who) == set(range(len(data))) and len(set(who.values())) == clusters
    expected = plain_loop(data, clusters, who).state_dict()
    assert result.model is not None
    found = load_file(result.model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.to(found[name].dtype), rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize(("clusters", "again"), [(2, 2), (2, 3)])
def test_a_resumed_run_goes_on_with_the_momentum_between_clusters(
    swarm: EmbeddedSwarm, tmp_path: Path, clusters: int, again: int
) -> None:
    data = batches([8] * 12)
    # Nothing that only one of the clusters knows: it would be what the others go on with.
    stepper = partial(torch.optim.SGD, lr=0.1)

    def job(updates: int) -> Job:
        return Job(
            model=a_model(),
            loss=F.cross_entropy,
            train_data=data,
            optimizer=stepper,
            averaging=Averaging(every=8 * EVERY, blocking=True, outer="nesterov", outer_momentum=0.6, rate_factor=1.0),
            pipeline=Pipeline(in_flight=1, record_updates=True),
            max_updates=updates,
        )

    first = swarm.train(job(2 * EVERY), providers=4, clusters=clusters, run=tmp_path / "run", display=False)
    assert first.summary.averaging.rounds == 2
    who = trained_by(tmp_path / "run")
    result = swarm.train(job(len(data)), providers=4, clusters=again, run=tmp_path / "run", resume=True, display=False)
    who |= trained_by(tmp_path / "run")
    assert set(who) == set(range(len(data)))
    expected = plain_loop(data, max(clusters, again), who, stepper, momentum=0.6).state_dict()
    assert result.model is not None
    found = load_file(result.model)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.to(found[name].dtype), rtol=1e-6, atol=1e-6, msg=name)

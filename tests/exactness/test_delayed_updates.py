"""With several microbatches in flight, training is delayed gradient descent: exactly that, with the delays recorded.

A run writes for every update of every stage which version of its weights the forward had used. A small simulation in
plain PyTorch repeats just these delays on the whole model, in one process, and must end with the same weights.
"""

import copy
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.func import functional_call

from ravnest import Job, Pipeline
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.monitor.events import read_events
from tests.exactness.plain_loop import copied, kept_generator, replayed_draws, train_plainly, worst_difference
from tests.models import ZOO, Made

STAGES = 3
UPDATES = 40
SGD = partial(torch.optim.SGD, lr=0.05)
ADAM = partial(torch.optim.Adam, lr=2e-3)


@pytest.mark.parametrize(
    ("name", "optimizer", "pipeline"),
    [
        ("cnn", SGD, Pipeline(correction="none", record_updates=True)),
        ("cnn", ADAM, Pipeline(correction="none", in_flight=4, record_updates=True)),
        ("gpt_tied", SGD, Pipeline(correction="none", in_flight=4, record_updates=True)),
        ("gpt_tied", SGD, Pipeline(correction="none", in_flight=4, max_staleness=3, record_updates=True)),
        ("gpt_tied", ADAM, Pipeline(correction="none", record_updates=True)),
        ("unet", SGD, Pipeline(correction="none", in_flight=4, max_staleness=1, record_updates=True)),
        ("cnn", ADAM, Pipeline(correction="none", in_flight=4, record_updates=True, versions="recompute")),
        (
            "gpt_tied",
            SGD,
            Pipeline(correction="none", in_flight=4, record_updates=True, versions="recompute", split_backward=True),
        ),
        ("cnn", ADAM, Pipeline(correction="none", in_flight=4, record_updates=True, versions="in_place")),
        (
            "unet",
            SGD,
            Pipeline(correction="none", in_flight=4, record_updates=True, versions="in_place", split_backward=True),
        ),
    ],
    ids=[
        *("cnn-sgd-default", "cnn-adam-4", "tied-sgd-4", "tied-sgd-bounded", "tied-adam-default", "unet-sgd-bounded"),
        *("cnn-adam-recomputed", "tied-sgd-recomputed-split", "cnn-adam-in-place", "unet-sgd-in-place-split"),
    ],
)
def test_several_in_flight_is_gradient_descent_with_the_recorded_delays(
    swarm: EmbeddedSwarm,
    tmp_path: Path,
    name: str,
    optimizer: Any,
    pipeline: Pipeline,
    record_property: Callable[[str, object], None],
) -> None:
    made = ZOO[name].make(batches=UPDATES)
    run = _train(swarm, made, optimizer, pipeline, tmp_path)
    delays, rows = _recorded(run)
    most = max(version - 1 - forward for stage in delays for forward, version in stage)
    limit = (_max_in_flight(run) if pipeline.in_flight is None else pipeline.in_flight) - 1
    if pipeline.max_staleness is not None:
        limit = min(limit, pipeline.max_staleness)
    assert 1 <= most <= limit, "the run must have been really asynchronous, and within its bounds"
    assert bool(rows) == (name == "gpt_tied"), "only a tied weight is looked up in at another stage"
    if pipeline.max_staleness is not None and rows:
        late = [delays[-1][update][1] - 1 - rows[n][0] for update, (_, had) in enumerate(rows) for n in had]
        assert 1 <= max(late) <= pipeline.max_staleness, "rows keep to the bound, too"
    in_place = pipeline.versions == "in_place"
    simulated = _simulate(made, optimizer, _owners(run), delays, rows, is_in_place=in_place)
    have = copy.deepcopy(made.model)
    have.load_state_dict(load_file(run / "model.safetensors"))
    worst, where = worst_difference(have.state_dict(), simulated.state_dict())
    record_property("worst_relative_difference", worst)
    record_property("max_stale", most)
    assert worst <= 1e-6, f"{where} is off by {worst:.1e}"
    fresh = train_plainly(ZOO[name], made, optimizer=optimizer)
    assert worst_difference(have.state_dict(), fresh.state_dict())[0] > 1e-4, "delays must have made a difference"


def test_no_staleness_allowed_is_a_plain_loop_whatever_is_in_flight(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    made = ZOO["gpt_tied"].make(batches=UPDATES)
    pipeline = Pipeline(in_flight=8, max_staleness=0, record_updates=True)
    run = _train(swarm, made, SGD, pipeline, tmp_path)
    assert all(version - 1 == forward for stage in _recorded(run)[0] for forward, version in stage)
    have = copy.deepcopy(made.model)
    have.load_state_dict(load_file(run / "model.safetensors"))
    plain = train_plainly(ZOO["gpt_tied"], made, optimizer=SGD)
    assert worst_difference(have.state_dict(), plain.state_dict())[0] <= 1e-6


def _train(swarm: EmbeddedSwarm, made: Made, optimizer: Any, pipeline: Pipeline, run: Path) -> Path:
    job = Job(
        model=made.model,
        loss=made.loss,
        metrics=made.metrics,
        train_data=made.batches,
        optimizer=optimizer,
        pipeline=pipeline,
    )
    return swarm.train(job, providers=STAGES, run=run, display=False).run


def _max_in_flight(run: Path) -> int:
    """As planned, or as was decided since."""
    return max(event["new"] for event in read_events(run / "events.jsonl") if event["kind"] == "in_flight")


def _recorded(run: Path) -> tuple[list[list[tuple[int, int]]], list[tuple[int, list[int]]]]:
    """For every stage, and every microbatch in order: the version its forward used and the one its update made. And for
    every microbatch, where rows are looked up: the version of the lookup, and the microbatches whose gradients of rows
    the update had."""
    stages: list[dict[int, tuple[int, int]]] = [{} for _ in range(STAGES)]
    rows: dict[int, tuple[int, list[int]]] = {}
    for line in (run / "updates.jsonl").read_text().splitlines():
        record = json.loads(line)
        stage = stages[record["stage"]]
        assert record["microbatch"] not in stage, "an update is recorded once"
        stage[record["microbatch"]] = (record["forward_version"], record["version"])
        if "rows" in record:
            rows[record["microbatch"]] = (record["lookup_version"], record["rows"])
    if rows:
        assert [number for _, had in rows.values() for number in had] == list(range(UPDATES)), "each is applied once"
    for stage in stages:
        assert list(stage) == list(range(UPDATES)), "every microbatch is applied, in the order it was fed"
        assert [version for _, version in stage.values()] == list(range(1, UPDATES + 1))
    return [list(stage.values()) for stage in stages], [rows.get(m, (0, [])) for m in range(UPDATES)] if rows else []


def _owners(run: Path) -> list[set[str]]:
    """The parameters of every stage, as its part of the checkpoint names them."""
    (newest,) = sorted((run / "checkpoints").iterdir())[-1:]
    owners = []
    for stage in range(STAGES):
        with safe_open(newest / f"part-{stage}.safetensors", framework="pt") as part:
            owners.append({key.removeprefix("param:") for key in part.keys() if key.startswith("param:")})  # noqa: SIM118
    return owners


LOOKED_UP, DENSE = "embedding.weight", "head.weight"
"""The names of the two uses of the tied weight."""


def _simulate(
    made: Made,
    optimizer: Any,
    owners: list[set[str]],
    delays: list[list[tuple[int, int]]],
    rows: list[tuple[int, list[int]]],
    *,
    is_in_place: bool,
) -> nn.Module:
    """Delayed gradient descent: each microbatch sees, stage by stage, the weights of the version it was given. The leaf
    looks rows up in another version than it uses itself, and applies their gradients when they have come back.

    With `is_in_place`, its backward sees those of the last version before its update.
    """
    model = copy.deepcopy(made.model).train()
    named = dict(model.named_parameters())
    assert sorted(named) == sorted(name for names in owners for name in names)
    histories: list[list[Mapping[str, torch.Tensor]]] = []
    optimizers = []
    for names in owners:
        histories.append([{name: named[name].detach().clone() for name in names}])
        optimizers.append(optimizer([named[name] for name in sorted(names)]))
    buffers = dict(model.named_buffers())
    of_rows: list[torch.Tensor] = []
    with kept_generator():
        for microbatch, batch in enumerate(made.batches):
            inputs, targets = copied(batch)
            weights = {
                name: tensor.clone().requires_grad_()
                for history, stage in zip(histories, delays, strict=True)
                for name, tensor in history[stage[microbatch][0]].items()
            }
            if rows:
                # The two uses of the tied weight get a tensor each.
                weights[DENSE] = weights[LOOKED_UP]
                weights[LOOKED_UP] = histories[-1][rows[microbatch][0]][LOOKED_UP].clone().requires_grad_()
            with replayed_draws(0, microbatch):
                outputs = functional_call(model, {**weights, **buffers}, (inputs,), tie_weights=False)
                loss = made.loss(outputs, targets)
            for name, tensor in named.items() if is_in_place else ():
                # `.data` bypasses autograd's check: the saved activations are those of the forward.
                weights[name].data.copy_(tensor)
            gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
            if rows:
                of_rows.append(gradients[LOOKED_UP])
                # One after the other: Adam makes whole steps of differences in rounding where a gradient is zero.
                gradients[LOOKED_UP] = sum((of_rows[number] for number in rows[microbatch][1]), gradients[DENSE])
            for names, history, stepper in zip(owners, histories, optimizers, strict=True):
                for name in names:
                    named[name].grad = gradients[name]
                stepper.step()
                history.append({name: named[name].detach().clone() for name in names})
    return model

"""With one microbatch in flight, k stages train exactly what a plain PyTorch loop trains.

Every kind of model, every number of stages: twenty updates through real provider processes, the fused model loaded
with `load_state_dict`, and every parameter and buffer compared with plain PyTorch's.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ravnest import Job, Pipeline
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.coordinator.launch.session import TrainResult
from ravnest.coordinator.plan.prepared_job import prepare
from ravnest.monitor.summary import Summary
from tests.exactness.plain_loop import call, copied, train_plainly, worst_difference
from tests.models import ZOO, Kind, Made

TOLERANCE = 1e-6


@pytest.mark.parametrize("name", ZOO)
def test_one_to_four_stages_train_and_evaluate_as_a_plain_loop_does(
    swarm: EmbeddedSwarm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
    name: str,
) -> None:
    # The four runs share one capture, which is what takes longest and is the same for all.
    monkeypatch.setattr("ravnest.coordinator.launch.session.prepare", _once(prepare))
    kind, made = ZOO[name], ZOO[name].make()
    plain = _plain(name)
    assert _moved(made.model, plain), "a model that does not learn would show nothing"
    evaluated = _evaluated(plain, made, kind)
    job = _job(kind, made)
    for stages in (1, 2, 3, 4):
        result = swarm.train(job, providers=stages, run=tmp_path / str(stages), display=False)
        worst, where = worst_difference(_loaded(result, made).state_dict(), plain.state_dict())
        record_property(f"worst_relative_difference_of_{stages}", worst)
        assert worst <= TOLERANCE, f"{where} is off by {worst:.1e} with {stages} stages"
        _check_summary(result.summary, kind, stages)
        assert result.summary.eval == pytest.approx(evaluated, rel=1e-5)


def test_training_leaves_the_model_that_was_given_as_it_was(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    made = ZOO["cnn_inplace"].make()
    made.model.features[3].eval()
    modes = [module.training for module in made.model.modules()]
    attributes = [sorted(vars(module)) for module in made.model.modules()]
    before = copy.deepcopy(made.model.state_dict())
    batches = copied(made.batches)
    _train(swarm, ZOO["cnn_inplace"], made, 2, tmp_path)
    assert [module.training for module in made.model.modules()] == modes
    assert [sorted(vars(module)) for module in made.model.modules()] == attributes
    assert all(parameter.grad is None for parameter in made.model.parameters())
    for key, tensor in made.model.state_dict().items():
        assert torch.equal(tensor, before[key]), key
    for (have, _), (want, _) in zip(made.batches, batches, strict=True):
        assert torch.equal(have, want)


@pytest.mark.parametrize("name", ["cnn", "gpt_tied"])
def test_clipping_by_norm_in_one_stage_is_that_of_a_plain_loop(swarm: EmbeddedSwarm, tmp_path: Path, name: str) -> None:
    kind, made = ZOO[name], ZOO[name].make()
    result = _train(swarm, kind, made, 1, tmp_path, clip_norm=0.3)
    plain = train_plainly(kind, made, clip_norm=0.3)
    assert worst_difference(plain.state_dict(), _plain(name).state_dict())[0] > 1e-3, "nothing was clipped"
    worst, where = worst_difference(_loaded(result, made).state_dict(), plain.state_dict())
    assert worst <= TOLERANCE, f"{where} is off by {worst:.1e}"


def test_clipping_by_value_is_the_same_for_every_cut(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    kind, made = ZOO["unet"], ZOO["unet"].make()
    one = _train(swarm, kind, made, 1, tmp_path / "one", clip_value=0.01)
    four = _train(swarm, kind, made, 4, tmp_path / "four", clip_value=0.01)
    worst, where = worst_difference(_loaded(four, made).state_dict(), _loaded(one, made).state_dict())
    assert worst <= TOLERANCE, f"{where} is off by {worst:.1e}"
    assert worst_difference(_loaded(one, made).state_dict(), _plain("unet").state_dict())[0] > 1e-3


def test_what_is_summed_at_the_end_is_applied_even_if_it_is_less_than_an_update_takes(
    swarm: EmbeddedSwarm, tmp_path: Path
) -> None:
    kind = replace(ZOO["tuple_inputs"], accumulate=3, optimizer=partial(torch.optim.SGD, lr=0.1))
    made = kind.make(batches=8)
    result = _train(swarm, kind, made, 2, tmp_path)
    # Two updates of three microbatches and one of two: the mean of what there is.
    model = copy.deepcopy(made.model)
    optimizer = kind.optimizer(model.parameters())
    for group in (made.batches[:3], made.batches[3:6], made.batches[6:]):
        optimizer.zero_grad()
        for inputs, targets in group:
            (made.loss(call(model, inputs), targets) / len(group)).backward()
        optimizer.step()
    worst, where = worst_difference(_loaded(result, made).state_dict(), model.state_dict())
    assert worst <= TOLERANCE, f"{where} is off by {worst:.1e}"


def test_a_run_repeats_itself_bit_for_bit_and_another_seed_does_not(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    kind, made = ZOO["cnn"], ZOO["cnn"].make()
    first, again, other = (
        load_file(_train(swarm, kind, made, 3, tmp_path / name, seed=seed).run / "model.safetensors")
        for name, seed in (("first", 5), ("again", 5), ("other", 6))
    )
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@cache
def _plain(name: str) -> nn.Module:
    return train_plainly(ZOO[name], ZOO[name].make())


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    results: list[Any] = []

    def wrapped(*arguments: Any) -> Any:
        if not results:
            results.append(function(*arguments))
        return results[0]

    return wrapped


def _train(swarm: EmbeddedSwarm, kind: Kind, made: Made, stages: int, run: Path, **settings: Any) -> TrainResult:
    return swarm.train(_job(kind, made, **settings), providers=stages, run=run, display=False)


def _job(
    kind: Kind, made: Made, *, seed: int = 0, clip_norm: float | None = None, clip_value: float | None = None
) -> Job:
    return Job(
        model=made.model,
        loss=made.loss,
        metrics=made.metrics,
        train_data=made.batches,
        eval_data=kind.make(seed=9, batches=5).batches,
        optimizer=kind.optimizer,
        schedule=kind.schedule,
        seed=seed,
        pipeline=Pipeline(in_flight=1, accumulate=kind.accumulate, clip_norm=clip_norm, clip_value=clip_value),
    )


def _loaded(result: TrainResult, made: Made) -> nn.Module:
    assert result.model is not None
    model = copy.deepcopy(made.model)
    model.load_state_dict(load_file(result.model))
    return model


def _moved(start: nn.Module, end: nn.Module) -> bool:
    trained = dict(end.named_parameters())
    return all(
        not torch.equal(parameter, trained[name])
        for name, parameter in start.named_parameters()
        if parameter.requires_grad
    )


def _check_summary(summary: Summary, kind: Kind, stages: int) -> None:
    assert summary.status == "finished"
    (cluster,) = summary.clusters
    assert len(cluster.stages) == stages
    for stage in cluster.stages:
        assert stage.updates == 20 // kind.accumulate
        assert stage.staleness.max == 0


def _evaluated(model: nn.Module, made: Made, kind: Kind) -> dict[str, float]:
    """Means over the samples, as a plain evaluation has them."""
    model = copy.deepcopy(model).eval()
    sums: dict[str, float] = {}
    samples = 0
    for batch in kind.make(seed=9, batches=5).batches:
        inputs, targets = copied(batch)
        with torch.no_grad():
            outputs = call(model, inputs)
            scores = {"loss": made.loss(outputs, targets), **{n: m(outputs, targets) for n, m in made.metrics.items()}}
        for name, score in scores.items():
            sums[name] = sums.get(name, 0.0) + float(score) * len(targets)
        samples += len(targets)
    return {name: total / samples for name, total in sums.items()}

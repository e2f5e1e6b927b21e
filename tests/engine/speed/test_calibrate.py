"""Calibration scales a profile to the times of real steps and does not change the model."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch

import ravnest
from ravnest.coordinator.plan.prepared_job import prepare
from ravnest.engine.settings import StageSettings
from ravnest.engine.speed.calibrate import (
    MAX_COLD_SECONDS,
    StepSeconds,
    calibrate,
    measure,
    products_speed,
    scaled,
    step_bytes,
    time_steps,
)
from ravnest.graph.profile import CostProfile, NodeCost
from ravnest.graph.update_cost import UpdateCost
from ravnest.spec import OptimizerSpec
from tests.graph.cutting import ALL, example

SETTINGS = StageSettings(optimizer=OptimizerSpec("AdamW", {"lr": 0.01}).to_json())


def costs_of(name: str) -> CostProfile:
    """1 ms forward and 2 ms backward per node, 10 ms per update plus 1 ms per parameter."""
    graph = example(name).captured.graph
    nodes = {node.name: NodeCost(1e-3, 2e-3, 64, 1000) for node in graph.nodes}
    update = UpdateCost(10e-3, 1e-3, 0.0, copy_byte_seconds=1e-9, state_bytes_per_byte=2.0)
    return CostProfile(nodes, samples=4, threads=1, update=update)


@pytest.mark.parametrize("name", ALL)
def test_timing_real_steps_changes_nothing(name: str) -> None:
    found = example(name).captured
    before, random_state = copy.deepcopy(dict(found.weights)), torch.get_rng_state()
    sample = {key: value.clone() for key, value in found.sample.items()}
    measured = time_steps(found.graph, found.weights, found.sample, SETTINGS, budget_seconds=0.0)
    assert min(measured.forward, measured.backward, measured.update) > 0
    assert torch.equal(torch.get_rng_state(), random_state)
    for key, weight in found.weights.items():
        assert torch.equal(weight, before[key]), key
        assert weight.grad is None
    assert all(torch.equal(value, sample[key]) for key, value in found.sample.items())


def test_scaled_costs_add_up_to_what_was_measured() -> None:
    graph = example("cnn").captured.graph
    costs = costs_of("cnn")
    found = scaled(costs, graph, StepSeconds(0.5, 3.0, 0.7, cold=0.01))
    assert found.stage_seconds == 0.01
    assert sum(cost.forward_seconds for cost in found.nodes.values()) == pytest.approx(0.5)
    assert sum(cost.backward_seconds for cost in found.nodes.values()) == pytest.approx(3.0)
    size = sum(torch.Size(p.shape).numel() * p.dtype.itemsize for p in graph.parameters)
    assert found.update.seconds(len(graph.parameters), size) == pytest.approx(0.7)
    # Fields that are no times of the step do not change.
    assert replace(found.update, step_seconds=0, parameter_seconds=0) == replace(
        costs.update, step_seconds=0, parameter_seconds=0
    )
    assert all(cost.saved_bytes == 1000 and cost.output_bytes == 64 for cost in found.nodes.values())


def test_zero_costs_stay_zero() -> None:
    graph = example("cnn").captured.graph
    costs = replace(costs_of("cnn"), update=UpdateCost())
    assert scaled(costs, graph, StepSeconds(0.5, 3.0, 0.7)).update == UpdateCost()


def test_a_model_too_large_for_a_whole_step_keeps_its_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    found = example("cnn").captured
    costs = costs_of("cnn")
    monkeypatch.setattr("ravnest.engine.speed.calibrate.time_steps", lambda *_: StepSeconds(1.0, 1.0, 1.0))
    needed = step_bytes(costs, found.graph)
    parameters = sum(torch.Size(p.shape).numel() * 4 for p in found.graph.parameters)
    assert needed == 4 * parameters + 1000 * len(found.graph.nodes)
    given = (found.graph, found.weights, found.sample, SETTINGS)
    assert calibrate(costs, *given, available_bytes=needed - 1) is costs
    assert calibrate(costs, *given, available_bytes=needed) != costs


@pytest.mark.parametrize(
    ("forward", "backward", "faster"),
    # 3 s of products and 6 of others: what is beyond the others is the products'.
    [(3.0, 6.0, 1.0), (2.5, 5.0, 2.0), (5.0, 13.0, 0.25), (1.0, 2.0, 20.0)],
)
def test_the_speed_of_products_excludes_other_operators(forward: float, backward: float, faster: float) -> None:
    nodes = {"a": NodeCost(1.0, 2.0, 64, 0, heavy=True), "b": NodeCost(2.0, 4.0, 64, 0)}
    costs, measured = replace(costs_of("cnn"), nodes=nodes), StepSeconds(forward, backward, 1.0)
    assert products_speed(costs, measured) == pytest.approx(faster)
    assert products_speed(replace(costs, nodes={"b": nodes["b"]}), measured) == 1.0


def test_the_first_step_does_not_count_and_the_budget_ends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [10.0, 1.0, 1.0, 5.0, 1.001, 1.0005, 9.0]
    now = 0.0

    def step(*_: object) -> tuple[float, float, float]:
        nonlocal now
        taken = seconds.pop(0)
        now += taken
        return taken, taken, taken

    monkeypatch.setattr("time.perf_counter", lambda: now)
    measured = measure(step, accumulate=4, budget_seconds=18.0, warm_share=1.0)
    # 10 + 1 + 1 seconds, and their mean for the next is in time. After 17 another is not, and two without the cache
    # come in any case.
    assert seconds == [9.0]
    assert (measured.forward, measured.backward, measured.update) == (1.0, 1.0, 0.25)
    assert measured.cold == pytest.approx(3 * 0.0005)


def test_the_cold_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for first, then, cold in ((1.0, 1.5, MAX_COLD_SECONDS), (1.5, 1.0, 0.0)):
        parts = iter([(first, first, first)] * 3 + [(then, then, then)] * 2)
        clock = iter(range(100))
        monkeypatch.setattr("time.perf_counter", lambda clock=clock: float(next(clock)))
        assert measure(lambda _, parts=parts: next(parts), accumulate=1, budget_seconds=6.0).cold == cold


def test_what_a_job_costs_comes_with_the_speed_of_the_machine_that_measured() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    batches = [(torch.randn(6, 4), torch.zeros(6, dtype=torch.long))] * 2
    job = ravnest.Job(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        train_data=batches,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    )
    before = copy.deepcopy(model.state_dict())
    costs = prepare(job, 1, None, lambda phase: None).costs
    assert costs.threads == 1 and costs.samples == 6
    assert 1e8 < costs.flops_per_second < 1e14 and 1e8 < costs.memory_bytes_per_second < 1e13
    assert costs.update.state_bytes_per_byte == 1.0
    heavy = {name for name, cost in costs.nodes.items() if cost.heavy}
    assert heavy and all(name.startswith("linear") for name in heavy)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

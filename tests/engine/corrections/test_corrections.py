"""Corrections of staleness: the plain optimizer bit for bit without staleness, and their promises with it."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ravnest.engine.corrections import nesterov
from ravnest.engine.corrections.cautious import Cautious
from ravnest.engine.corrections.correction import Correction, correction_named, correction_refusal
from ravnest.engine.corrections.discount import Discount
from ravnest.engine.corrections.nesterov import NesterovCorrection, momentum
from ravnest.engine.corrections.plain import Plain
from ravnest.engine.corrections.predict import Predict
from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.engine.weights.blocks import Blocks
from ravnest.errors import GraphError
from ravnest.graph.capture.capture import Captured, capture
from ravnest.settings import CORRECTIONS
from ravnest.spec import OptimizerSpec
from tests.e2e.jobs import a_net, batches
from tests.engine.stages import stages_of

OPTIMIZERS = [
    OptimizerSpec("AdamW", {"lr": 0.01}),
    OptimizerSpec("Adam", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    OptimizerSpec("NAdam", {"lr": 0.01}),
    OptimizerSpec("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    OptimizerSpec("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    OptimizerSpec("SGD", {"lr": 0.05}),
    OptimizerSpec("RMSprop", {"lr": 0.01}),
]
NAMES = [f"{spec.name}-{number}" for number, spec in enumerate(OPTIMIZERS)]


@pytest.fixture(scope="module")
def captured() -> Captured:
    return capture(a_net(), F.cross_entropy, {}, batches([8, 5]))


def a_stage(captured: Captured, correction: str, optimizer: OptimizerSpec = OPTIMIZERS[0]) -> Stage:
    return stages_of(captured, [captured.graph], optimizer, correction=correction)[0]


def train(stage: Stage, captured: Captured, first: int, count: int, ahead: int) -> list[int]:
    """Trains `count` microbatches, with forwards `ahead` of the backwards; returns the staleness of each update."""
    found = []
    data = [captured.structure.flatten(batch) for batch in batches([8] * 4)]
    for number in range(first, first + count + ahead):
        if number < first + count:
            stage.forward(number, data[number % 4])
        if number >= first + ahead:
            stage.backward(number - ahead, None)
            update = stage.update(number - ahead)
            assert update is not None
            found.append(update.staleness)
    return found


def step(correction: Correction, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    """Steps the optimizer's only parameter."""
    blocks = Blocks(optimizer, {"w": parameter})
    for block in blocks.of(("w",)):
        correction.step(block)


def same(one: Stage, other: Stage) -> bool:
    mine, others = one.state_tensors(), other.state_tensors()
    return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
def test_without_staleness_every_correction_is_bitwise_the_plain_optimizer(
    captured: Captured, correction: str, optimizer: OptimizerSpec
) -> None:
    corrected, plain = a_stage(captured, correction, optimizer), a_stage(captured, "none", optimizer)
    for stage in (corrected, plain):
        assert train(stage, captured, 0, 6, ahead=0) == [0] * 6
    assert same(corrected, plain)
    assert corrected.state()[1] == plain.state()[1]


@pytest.mark.parametrize("correction", [name for name in CORRECTIONS if name != "none"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
def test_stale_updates_are_corrected_or_a_reason_is_given(
    captured: Captured, correction: str, optimizer: OptimizerSpec
) -> None:
    corrected, plain = a_stage(captured, correction, optimizer), a_stage(captured, "none", optimizer)
    for stage in (corrected, plain):
        assert max(train(stage, captured, 0, 8, ahead=3)) == 3
    reason = correction_refusal(correction, optimizer)
    assert same(corrected, plain) == (reason is not None)
    assert all(torch.isfinite(tensor).all() for tensor in corrected.state_tensors().values())


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)
def test_the_arguments_of_the_optimizer_are_the_job_s_after_every_update(
    captured: Captured, correction: str, optimizer: OptimizerSpec
) -> None:
    stage, fresh = a_stage(captured, correction, optimizer), a_stage(captured, "none", optimizer)
    train(stage, captured, 0, 8, ahead=3)
    groups = [json.loads(each.state()[1]["optimizer"])["groups"] for each in (stage, fresh)]
    assert groups[0] == groups[1]


def test_an_update_of_several_microbatches_is_as_stale_as_they_are_on_average(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = StageSettings(optimizer=OPTIMIZERS[0].to_json(), correction="discount", accumulate=3)
    weights = {spec.key: captured.weights[spec.key].clone() for spec in captured.graph.weights}
    stage = Stage(captured.graph, weights, settings)
    seen: list[float] = []
    monkeypatch.setattr(stage.correction, "begin_update", lambda staleness, version: seen.append(staleness))
    data = captured.structure.flatten(batches([8])[0])
    worst = []
    for number in range(11):
        stage.forward(number, data)
        if number < 2:
            continue
        stage.backward(number - 2, None)
        if (update := stage.update(number - 2)) is not None:
            worst.append(update.staleness)
    # Two of three had their forward before the update that came last, and one after it.
    assert worst == [0, 1, 1]
    assert seen == pytest.approx([0, 2 / 3, 2 / 3])


def test_the_state_of_nesterovs_step_survives_a_save(captured: Captured) -> None:
    stage, other = a_stage(captured, "nesterov"), a_stage(captured, "nesterov")
    train(stage, captured, 0, 8, ahead=3)
    tensors, metadata = stage.state()
    products = [v for k, v in json.loads(metadata["optimizer"])["values"].items() if k.endswith(":momentum_product")]
    assert products and all(0 < product < 1 for product in products)
    optimizer: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(":")
        if kind == "optim":
            key, _, entry = rest.rpartition(":")
            optimizer.setdefault(key, {})[entry] = tensor.clone()
        elif kind == "param":
            other.state_tensors()[name].copy_(tensor)
    other.restore(optimizer, metadata)
    assert same(stage, other) and other.state()[1] == metadata
    # A restored stage measures its staleness again, so both need the same measurements to continue in the same way.
    for each in (stage, other):
        each.correction = NesterovCorrection(each.optimizer)
        train(each, captured, 8, 8, ahead=2)
    assert same(stage, other)


def test_with_one_in_flight_again_training_continues_as_the_plain_optimizer(captured: Captured) -> None:
    made = a_stage(captured, "nesterov")
    train(made, captured, 0, 8, ahead=3)
    tensors, metadata = made.state()
    stages = [a_stage(captured, correction) for correction in ("nesterov", "predict", "none")]
    for stage in stages:
        optimizer: dict[str, dict[str, Any]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optim:"):
                key, _, entry = name.removeprefix("optim:").rpartition(":")
                optimizer.setdefault(key, {})[entry] = tensor.clone()
        stage.restore(optimizer, metadata)
        train(stage, captured, 8, 4, ahead=0)
    assert same(stages[0], stages[2]) and same(stages[1], stages[2])


def test_predicted_weights_are_used_by_forwards_and_by_nothing_else(captured: Captured) -> None:
    stage, plain = a_stage(captured, "predict"), a_stage(captured, "none")
    sample = dict(captured.sample)
    for each in (stage, plain):
        train(each, captured, 0, 1, ahead=0)
    stage.correction.begin_update(3, 1)
    before = {name: tensor.clone() for name, tensor in stage.state_tensors().items()}
    loss = str(stage.graph.loss)
    assert float(stage.forward(1, sample)[loss]) != float(plain.forward(1, sample)[loss])
    assert float(stage.evaluate(sample)[loss]) == float(plain.evaluate(sample)[loss])
    assert all(torch.equal(before[name], tensor) for name, tensor in stage.state_tensors().items())


def test_forwards_between_two_updates_share_the_prediction(captured: Captured) -> None:
    stage = a_stage(captured, "foresight")
    train(stage, captured, 0, 6, ahead=2)
    correction = stage.correction
    first = correction.forward_weights()
    assert first is not None and correction.forward_weights() is first
    name, tensor = next(iter(first.items()))
    before = tensor.detach().clone()
    # A prediction after a change that was no update is the one that the update would have made.
    correction.moved()
    again = correction.forward_weights()
    assert again is not None and again is not first and torch.equal(again[name], tensor)
    stage.shift({f"param:{spec.key}": torch.ones(spec.shape) for spec in stage.graph.parameters})
    shifted = correction.forward_weights()
    assert shifted is not None
    torch.testing.assert_close(shifted[name].detach(), before + 1)
    assert torch.equal(tensor.detach(), before), "what is in flight keeps its weights"


def test_the_prediction_covers_the_updates_until_the_gradient_arrives() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    for optimizer in (torch.optim.AdamW([parameter], lr=0.01, weight_decay=0), torch.optim.SGD([parameter], 0.01, 0.9)):
        correction = Predict(optimizer, {"w": parameter})
        # A gradient that does not change is what a prediction is exact for, once the momentum has come to its end.
        for _ in range(300):
            parameter.grad = torch.tensor([0.5, -0.1, 2.0])
            correction.begin_update(4, 0)
            step(correction, optimizer, parameter)
        predicted = correction.forward_weights()
        assert predicted is not None
        for _ in range(4):
            parameter.grad = torch.tensor([0.5, -0.1, 2.0])
            step(correction, optimizer, parameter)
        torch.testing.assert_close(predicted["w"].detach(), parameter.detach(), rtol=1e-4, atol=1e-4)


def test_cautious_predicts_with_the_discounted_learning_rate() -> None:
    ahead: dict[float, float] = {}
    for warm_up_updates in (0, 100):
        parameter = torch.nn.Parameter(torch.tensor([1.0]))
        optimizer = torch.optim.AdamW([parameter], lr=0.01, weight_decay=0)
        correction = Cautious(optimizer, {"w": parameter}, warm_up_updates or 1)
        stepped = []
        for version in range(50):
            before = parameter.item()
            parameter.grad = torch.tensor([0.5])
            correction.begin_update(4, version)
            step(correction, optimizer, parameter)
            stepped.append(before - parameter.item())
        predicted = correction.forward_weights()
        assert predicted is not None
        ahead[warm_up_updates] = parameter.item() - predicted["w"].item()
        discount = 5.0 ** -(0.51 if warm_up_updates else 0.0)
        assert stepped[-1] == pytest.approx(0.01 * discount, rel=0.02)
    assert ahead[100] == pytest.approx(ahead[0] * 5.0**-0.51, rel=0.02)


def test_the_momentum_grows_with_staleness_from_the_job_s_own() -> None:
    assert momentum(0.9, 0) == pytest.approx(0.9)
    assert momentum(0.9, 3) == pytest.approx(0.975)
    assert momentum(0.9, 1000) == pytest.approx(0.99)
    assert momentum(0.995, 5) == 0.995


def test_adam_takes_the_step_of_nadam(monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch lets the momentum rise to beta1, here at once.
    monkeypatch.setattr(nesterov, "momentum", lambda own, staleness: own)
    ours, theirs = (torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0])) for _ in range(2))
    optimizer = torch.optim.Adam([ours], lr=0.1, betas=(0.9, 0.99))
    correction = NesterovCorrection(optimizer)
    reference = torch.optim.NAdam([theirs], lr=0.1, betas=(0.9, 0.99), momentum_decay=1e6)
    for _ in range(40):
        correction.begin_update(2, 0)
        for parameter in (ours, theirs):
            parameter.grad = parameter.detach() - 0.5
        step(correction, optimizer, ours)
        reference.step()
        torch.testing.assert_close(ours, theirs)


def test_the_total_step_of_sgd_does_not_depend_on_the_momentum() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    first, second = (torch.optim.SGD([p], lr=0.01, momentum=0.9) for p in parameters)
    correction = NesterovCorrection(first)
    for _ in range(3000):
        correction.begin_update(3, 0)
        for parameter in parameters:
            parameter.grad = torch.tensor([1.0, -1.0])
        step(correction, first, parameters[0])
        second.step()
    torch.testing.assert_close(parameters[0], parameters[1], rtol=0.02, atol=0)


def test_the_discount_ends_over_the_warm_up() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    correction = Discount(optimizer, warm_up_updates=100)
    moved = []
    for staleness, version in ((3, 0), (0, 0), (3, 50), (3, 100), (3, 1000)):
        before = parameter.item()
        parameter.grad = torch.ones(1)
        correction.begin_update(staleness, version)
        step(correction, optimizer, parameter)
        moved.append(before - parameter.item())
        assert optimizer.param_groups[0]["lr"] == 1.0
    assert moved == pytest.approx([0.25, 1.0, 0.5, 1.0, 1.0])


def test_an_unknown_correction_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(GraphError, match="no correction of staleness 'hope'"):
        correction_named("hope", optimizer, {})
    text = StageSettings(optimizer=OPTIMIZERS[0].to_json(), correction="hope").to_json()
    with pytest.raises(GraphError, match="correction is 'hope'"):
        StageSettings.from_json(text)


@pytest.mark.parametrize(
    ("correction", "optimizer", "words"),
    [
        ("nesterov", OptimizerSpec("RMSprop", {"lr": 0.01}), "RMSprop has no form"),
        ("nesterov", OptimizerSpec("SGD", {"lr": 0.01}), "SGD without momentum"),
        ("predict", OptimizerSpec("SGD", {"lr": 0.01}), "SGD without momentum"),
        ("predict", OptimizerSpec("Adagrad", {"lr": 0.01}), "Adagrad"),
    ],
)
def test_an_unsupported_optimizer_is_left_alone_with_a_reason(
    correction: str, optimizer: OptimizerSpec, words: str
) -> None:
    assert words in str(correction_refusal(correction, optimizer))
    made = correction_named(correction, optimizer.build([torch.nn.Parameter(torch.zeros(2))]), {})
    assert isinstance(made, Plain)

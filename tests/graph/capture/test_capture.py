"""Capture: the model as a portable graph, the model itself untouched, and what cannot be captured refused by name."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ravnest.errors import CaptureError, JobError
from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.portable import Ref
from tests.exactness.plain_loop import call, copied, kept_generator, replayed_draws
from tests.graph.cutting import ALL, example, run
from tests.models import ZOO
from tests.odd_models import ThreeLayers

Tensor = torch.Tensor


@pytest.mark.parametrize("name", ALL)
def test_capture_leaves_the_model_exactly_as_it_was(name: str) -> None:
    made = ALL[name].make(batches=2)
    model = made.model
    # Modes that no call of train() or eval() alone would restore.
    for number, module in enumerate(model.modules()):
        module.training = number % 3 != 1
    before, batches = _photograph(model), copied(made.batches)
    random_state = torch.get_rng_state()
    capture(model, made.loss, made.metrics, made.batches)
    assert _differences(before, _photograph(model)) == []
    assert torch.equal(torch.get_rng_state(), random_state)
    for have, want in zip(_tensors(made.batches), _tensors(batches), strict=True):
        assert torch.equal(have, want)


@pytest.mark.parametrize("name", ALL)
def test_evaluation_is_the_models_own_eval_on_other_data_than_the_sample(name: str) -> None:
    found = example(name).captured
    other = ALL[name].make(seed=7, batches=5)
    model = ALL[name].make(batches=1).model.eval()
    for batch in other.batches[3:]:
        inputs, targets = copied(batch)
        with torch.no_grad():
            outputs = call(model, inputs)
            loss = other.loss(outputs, targets)
            scores = {metric: score(outputs, targets) for metric, score in other.metrics.items()}
        have = run(found, [], batch, train=False)
        torch.testing.assert_close(have.loss, loss, rtol=1e-6, atol=0.0)
        assert set(have.metrics) == set(scores)
        for metric, score in scores.items():
            torch.testing.assert_close(have.metrics[metric], score, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", ALL)
def test_what_was_captured_is_the_whole_state_dict_under_its_own_names(name: str) -> None:
    found = example(name).captured
    want = example(name).made.model.state_dict()
    have = {key: tensor for key, tensor in found.weights.items() if key not in found.not_saved}
    have.update({name: have[owner] for name, owner in found.aliases.items()})
    have.update(found.static)
    assert set(have) == set(want)
    for key, tensor in want.items():
        assert torch.equal(have[key], tensor), key


def test_a_tied_weight_is_one_parameter_of_the_graph() -> None:
    found = example("gpt_tied").captured
    keys = [p.key for p in found.graph.parameters]
    assert keys.count("embedding.weight") == 1 and "head.weight" not in keys
    assert found.aliases == {"head.weight": "embedding.weight"}


def test_frozen_parameters_and_unused_buffers_are_not_trained() -> None:
    frozen = example("frozen").captured
    assert not any(p.key.startswith("backbone") for p in frozen.graph.parameters)
    assert {c.key for c in frozen.graph.constants} >= {"backbone.0.weight", "backbone.1.bias"}
    assert {s.key for s in frozen.graph.states} >= {"backbone.1.running_mean", "backbone.1.num_batches_tracked"}
    buffers = example("shared_buffer").captured
    assert set(buffers.static) == {"unused"}
    assert "shift" in buffers.not_saved


def test_the_batch_size_stays_free_even_when_captured_on_batches_of_one() -> None:
    model = ThreeLayers()
    one = (torch.randn(1, 8), torch.randn(1, 8))
    found = capture(model, F.mse_loss, {}, [one, one])
    batch = (torch.randn(5, 8), torch.randn(5, 8))
    assert torch.equal(run(found, [], batch).loss, F.mse_loss(model(batch[0]), batch[1]).detach())


def test_a_size_that_differs_between_the_first_two_batches_stays_free() -> None:
    kind = ZOO["gpt_tied"]
    made = kind.make(batches=1)
    model = made.model.eval()

    def tokens(length: int) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 32, (3, length)), torch.randint(0, 32, (3, length))

    found = capture(model, made.loss, {}, [tokens(8), tokens(6)])
    for length in (3, 8, 11):
        batch = tokens(length)
        with torch.no_grad():
            want = made.loss(model(batch[0]), batch[1])
        torch.testing.assert_close(run(found, [], batch, train=False).loss, want, rtol=1e-6, atol=0.0)


def test_loss_and_metrics_may_be_modules_with_weights_of_their_own() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.rand(8)).eval()
    metric = nn.CrossEntropyLoss(label_smoothing=0.1)
    batch = (torch.randn(4, 8), torch.randint(0, 8, (4,)))
    model = ThreeLayers()
    found = capture(model, loss, {"smooth": metric}, [batch])
    have = run(found, [], batch, train=False)
    with torch.no_grad():
        assert torch.equal(have.loss, loss(model(batch[0]), batch[1]))
        assert torch.equal(have.metrics["smooth"], metric(model(batch[0]), batch[1]))
    assert not loss.training and metric.training


def test_inputs_called_like_what_capture_makes_of_them_do_not_collide() -> None:
    class Writes(ThreeLayers):
        def forward(self, x: Tensor, x_copy: Tensor) -> Tensor:
            x.add_(1.0)
            return self.rest(self.a(x) + x_copy)

    model = Writes()
    batch = ({"x": torch.randn(4, 8), "x_copy": torch.randn(4, 8)}, torch.randn(4, 8))
    found = capture(model, F.mse_loss, {}, [batch])
    want = F.mse_loss(model(**copied(batch[0])), batch[1])
    assert torch.equal(run(found, [], batch).loss, want.detach())


# Models that cannot be captured. Each is on lines of its own, because the error must name the relevant line.


class BranchesOnValues(ThreeLayers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if hidden.sum() > 0:  # a branch
            hidden = hidden * 2
        return self.rest(hidden)


class ReadsANumber(ThreeLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.a(x)) * x.mean().item()  # a number


class LoopsOnValues(ThreeLayers):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.abs().max())):  # a loop
            x = self.a(x)
        return self.rest(x)


class UsesNumpy(ThreeLayers):
    def forward(self, x: Tensor) -> Tensor:
        scale = np.abs(x.detach().numpy()).max()  # an array
        return self.rest(self.a(x)) * float(scale)


class UsesAForeignOperator(ThreeLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.rest(torch.fft.fft(self.a(x)).abs())  # a transform


class Fails(ThreeLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.a(x[:, :3]))  # a wrong shape


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (BranchesOnValues, "# a branch"),
        (ReadsANumber, "# a number"),
        (LoopsOnValues, "# a loop"),
        (UsesNumpy, "# an array"),
        (UsesAForeignOperator, "# a transform"),
        (Fails, "# a wrong shape"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_the_users_own_line(
    kind: type[nn.Module], line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with open(__file__, encoding="utf-8") as source:
        number = next(i for i, text in enumerate(source, 1) if text.rstrip().endswith(line))
    with pytest.raises(CaptureError) as caught:
        _capture(kind())
    message = str(caught.value)
    assert f" at {__file__}:{number} (`" in message and line in message, message
    assert "\n" not in message
    # torch prints whole graphs in addition to such errors; a user should see one sentence only.
    assert capfd.readouterr() == ("", "")


def test_data_dependent_control_flow_is_told_what_to_do_instead() -> None:
    with pytest.raises(CaptureError, match=r"must not depend on the values in a tensor: use torch\.where"):
        _capture(BranchesOnValues())
    with pytest.raises(CaptureError, match=r"keep the number in its tensor"):
        _capture(ReadsANumber())


def test_a_model_that_trains_otherwise_than_it_evaluates_does_so_in_the_swarm() -> None:
    class OnlyInTraining(ThreeLayers):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            if self.training:
                hidden = hidden * 2
            return self.rest(hidden)

    model = OnlyInTraining()
    found = _capture(model)
    batch = (torch.randn(5, 8), torch.randn(5, 8))
    assert torch.equal(run(found, [], batch).loss, F.mse_loss(model(batch[0]), batch[1]).detach())
    evaluated = F.mse_loss(model.eval()(batch[0]), batch[1]).detach()
    assert torch.equal(run(found, [], batch, train=False).loss, evaluated)
    assert not torch.equal(run(found, [], batch).loss, evaluated)


@pytest.mark.parametrize("seed", range(6))
def test_a_draw_is_captured_whatever_it_draws(seed: int) -> None:
    class DropsPath(ThreeLayers):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            if self.training:
                hidden = hidden * torch.bernoulli(torch.full((x.shape[0], 1), 0.9))
            return self.rest(hidden)

    torch.manual_seed(seed)
    model = DropsPath()
    batch = (torch.randn(4, 8), torch.randn(4, 8))
    found = capture(model, F.mse_loss, {}, [batch, batch])
    evaluated = F.mse_loss(model.eval()(batch[0]), batch[1]).detach()
    assert torch.equal(run(found, [], batch, train=False).loss, evaluated)
    losses = {float(run(found, [], batch, microbatch=number).loss) for number in range(20)}
    assert len(losses) > 1, "it never dropped a path"


def test_what_is_drawn_in_evaluation_too_stays_on_and_is_the_same_again() -> None:
    class Noisy(ThreeLayers):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3)  # nothing uses it, and yet it is drawn
            hidden = F.dropout(self.a(x), 0.5)
            return self.rest(hidden + torch.randn_like(hidden))

    found = _capture(Noisy())
    batch = (torch.randn(4, 8), torch.randn(4, 8))
    first, again, other = (run(found, [], batch, train=False, microbatch=m).loss for m in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    dropout = next(n for n in found.graph.nodes if "dropout" in n.op)
    assert dropout.evaluation is not None and dropout.evaluation.args[1:] == (0.5, True)


def test_what_is_drawn_in_evaluation_alone_leaves_the_draws_of_training_as_they_were() -> None:
    class NoisyEvaluation(ThreeLayers):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                x = x + 0.1 * torch.randn_like(x)
            return self.rest(F.dropout(self.a(x), 0.5, self.training))

    model = NoisyEvaluation()
    found = _capture(model)
    batch = (torch.randn(4, 8), torch.randn(4, 8))
    with kept_generator(), replayed_draws(0, 3):
        want = F.mse_loss(model(batch[0]), batch[1]).detach()
    evaluated = run(found, [], batch, train=False, microbatch=3).loss
    for places in ([], *([cut] for cut in layout(found.graph).cuts)):
        assert torch.equal(run(found, places, batch, microbatch=3).loss, want)
        assert torch.equal(run(found, places, batch, train=False, microbatch=3).loss, evaluated)


@pytest.mark.parametrize(("source", "name"), [(random.random, "random"), (np.random.rand, "numpy.random")])
def test_numbers_drawn_outside_of_torch_are_refused(source: Any, name: str) -> None:
    class Draws(ThreeLayers):
        def forward(self, x: Tensor) -> Tensor:
            return self.rest(self.a(x)) if source() < 2 else x

    with pytest.raises(CaptureError, match=f"the forward draws random numbers from {name}: .* draw with torch.rand"):
        _capture(Draws())


def test_a_model_that_changes_its_state_in_evaluation_is_refused_and_not_changed() -> None:
    class AlwaysCounts(ThreeLayers):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            self.mean.mul_(0.9).add_(hidden.detach().mean(0))
            return self.rest(hidden - self.mean)

    model = AlwaysCounts()
    with pytest.raises(CaptureError, match=r"the model changes mean at .*self.mean.mul_.* in eval\(\)"):
        _capture(model)
    assert torch.equal(model.mean, torch.zeros(8))


def test_a_forward_that_changes_a_trained_parameter_is_refused() -> None:
    class Clamps(ThreeLayers):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.a.weight.view(-1).clamp_(-9.0, 9.0)
            return super().forward(x)

    with pytest.raises(CaptureError, match=r"changes the trainable parameter a\.weight in place"):
        _capture(Clamps())


def test_two_parameters_over_one_memory_are_refused() -> None:
    model = ThreeLayers()
    model.c.weight.data = model.a.weight.data
    with pytest.raises(CaptureError, match=r"a\.weight and c\.weight share memory"):
        _capture(model)


def test_a_trainable_parameter_of_the_loss_is_refused() -> None:
    class LearnedLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.mse_loss(outputs, targets) * self.scale

    with pytest.raises(CaptureError, match=r"loss\.scale is trainable, but it is part of the loss"):
        _capture(ThreeLayers(), LearnedLoss())


def test_autocast_inside_the_model_is_refused() -> None:
    class Casts(ThreeLayers):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = self.a(x)
            return self.rest(hidden.float())

    with pytest.raises(CaptureError, match="autocast"):
        _capture(Casts())


def test_a_loss_that_no_parameter_leads_to_is_refused() -> None:
    with pytest.raises(JobError, match="depends on no trainable parameter"):
        _capture(ThreeLayers(), lambda outputs, targets: F.mse_loss(outputs.detach(), targets))


def test_a_loss_that_is_a_constant_is_refused() -> None:
    with pytest.raises((JobError, CaptureError), match=r"constant|trainable"):
        _capture(ThreeLayers(), lambda outputs, targets: torch.zeros(()))


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda outputs, targets: (outputs - targets).square(), "must return one number"),
        (lambda outputs, targets: 1.0, "must return a tensor"),
        (lambda outputs, targets: (outputs > targets).sum(), "must return a floating-point number"),
    ],
)
def test_a_loss_of_the_wrong_kind_is_refused(loss: Any, reason: str) -> None:
    with pytest.raises(JobError, match=reason):
        _capture(ThreeLayers(), loss)


def test_uninitialised_memory_becomes_zeros() -> None:
    class Empty(ThreeLayers):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            room = torch.empty(hidden.shape)
            room[:] = hidden
            return self.rest(room + torch.empty_like(hidden).copy_(hidden))

    found = _capture(Empty())
    assert not any("empty" in node.op for node in found.graph.nodes)
    assert any(node.op == "aten.zeros.default" for node in found.graph.nodes)


def test_random_operators_are_numbered_in_the_order_they_run() -> None:
    graph = example("gpt_tied").graph
    seeds = [n.seed for n in graph.nodes if n.seed is not None]
    # Three blocks, each with dropout in its attention and behind both of its halves.
    assert seeds == list(range(9))
    silent = ZOO["gpt_tied"].make(batches=1)
    for module in silent.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    found = capture(silent.model, silent.loss, {}, silent.batches)
    assert [n.seed for n in found.graph.nodes if n.seed is not None] == [0, 1, 2], "only attention still draws"


def test_a_pick_of_several_results_stands_right_behind_what_made_them() -> None:
    for name in ("lstm", "in_place", "hf_gpt2"):
        nodes = example(name).graph.nodes
        made = {n.name: i for i, n in enumerate(nodes)}
        for i, node in enumerate(nodes):
            if node.op == "py.getitem" and isinstance(node.args[0], Ref):
                between = nodes[made[node.args[0].name] + 1 : i]
                assert all(n.op == "py.getitem" for n in between), node.name


def _capture(model: nn.Module, loss: Any = F.mse_loss) -> Captured:
    torch.manual_seed(0)
    batch = (torch.randn(4, 8), torch.randn(4, 8))
    return capture(model, loss, {}, [batch, batch])


def _photograph(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that could be changed: tensors, modes, attributes and hooks of every module."""
    seen: dict[str, Any] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        seen[f"{name} identity"] = id(tensor)
        seen[f"{name} value"] = tensor.detach().clone()
        seen[f"{name} requires_grad"] = tensor.requires_grad
        seen[f"{name} grad"] = tensor.grad is None
        seen[f"{name} memory"] = tensor.data_ptr()
    for name, module in model.named_modules():
        seen[f"{name} training"] = module.training
        seen[f"{name} attributes"] = sorted(vars(module))
        seen[f"{name} type"] = type(module)
        for attribute, value in vars(module).items():
            if "hooks" in attribute and value is not None:
                seen[f"{name} {attribute}"] = list(value)
            elif isinstance(value, bool | int | float | str | tuple):
                seen[f"{name} {attribute}"] = copy.copy(value)
    return seen


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    changed = sorted(set(before) ^ set(after))
    for name in before.keys() & after.keys():
        have, want = after[name], before[name]
        same = torch.equal(have, want) if isinstance(want, Tensor) else have == want
        if not same:
            changed.append(name)
    return changed


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    items = batch.values() if isinstance(batch, dict) else batch
    return [tensor for item in items for tensor in _tensors(item)]

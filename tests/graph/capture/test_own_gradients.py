"""Backward passes that a model brings along: trained exactly, in every cut, or refused by name; never dropped."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ravnest.engine.passes.split_backward import SplitBackward
from ravnest.errors import CaptureError, GraphError
from ravnest.graph.capture.capture import Captured, capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.portable_reader import read_graph
from ravnest.graph.program import Program, WeightUse
from ravnest.graph.weight_uses import weight_uses
from tests.graph.cutting import Outcome, example, run
from tests.odd_models import Binarized, Reversed, ThreeLayers

Tensor = torch.Tensor


@pytest.mark.parametrize("name", ["OwnBackwards", "Hooked"])
def test_every_single_cut_gives_bitwise_the_gradients_of_the_whole(name: str) -> None:
    found, batch = example(name).captured, example(name).made.batches[2]
    whole = run(found, [], batch)
    cuts = layout(found.graph).cuts
    assert len(cuts) > 4
    for cut in cuts:
        have = run(found, [cut], batch)
        assert have.gradients.keys() == whole.gradients.keys()
        assert all(torch.equal(have.gradients[k], g) for k, g in whole.gradients.items()), cut


def test_without_its_own_backward_passes_the_model_would_train_something_else() -> None:
    class Plain(ThreeLayers):
        def forward(self, x: Tensor) -> Tensor:
            return self.rest(self.a(x))

    class Reverses(ThreeLayers):
        def forward(self, x: Tensor) -> Tensor:
            return self.rest(Reversed.apply(self.a(x), 1.0))

    plain, reverses = Plain(), Reverses()
    reverses.load_state_dict(plain.state_dict())
    batch = _batch()
    first, second = (run(capture(m, F.mse_loss, {}, [batch]), [], batch).gradients for m in (plain, reverses))
    assert torch.equal(first["a.weight"], -second["a.weight"]) and torch.equal(first["b.weight"], second["b.weight"])


def test_gradients_of_weights_that_wait_are_the_same() -> None:
    found, batch = example("OwnBackwards").captured, example("OwnBackwards").made.batches[0]
    graph = found.graph
    whole = run(found, [], batch).gradients
    program = Program(graph)
    weights = {w.name: found.weights[w.key].clone() for w in graph.weights}
    leaves = {p.name: weights[p.name].requires_grad_() for p in graph.parameters}
    apart: list[WeightUse] = []
    values = found.structure.flatten(batch)
    loss = program.run(values, weights, train=True, apart=apart)[str(graph.loss)]
    assert len(apart) == len(weight_uses(graph)) == 3
    split = SplitBackward(apart)
    early = split.first([loss], [torch.ones(())], list(leaves.values()))
    late = split.rest(leaves, dict(zip(leaves, early, strict=True)))
    for parameter in graph.parameters:
        gradient = late[parameter.name]
        assert gradient is not None
        torch.testing.assert_close(gradient, whole[parameter.key], rtol=1e-6, atol=1e-7)


def test_hooks_on_parameters_run_in_the_order_they_were_registered() -> None:
    model = ThreeLayers()
    model.a.weight.register_hook(lambda gradient: gradient * 2)
    model.a.weight.register_hook(lambda gradient: gradient + 1)
    batch = _batch()
    found = capture(model, F.mse_loss, {}, [batch])
    F.mse_loss(model(batch[0]), batch[1]).backward()
    assert model.a.weight.grad is not None
    for places in ([], [layout(found.graph).cuts[-1]]):
        torch.testing.assert_close(run(found, places, batch).gradients["a.weight"], model.a.weight.grad)


def test_a_checkpoint_that_runs_its_part_again_is_what_it_is_without() -> None:
    class Recomputes(ThreeLayers):
        def forward(self, x: Tensor) -> Tensor:
            from torch.utils.checkpoint import checkpoint

            return self.c(checkpoint(lambda q: torch.tanh(self.b(q)), self.a(x), use_reentrant=True))

    _assert_trained_exactly(Recomputes())


def test_a_function_whose_input_needs_no_gradient_runs_its_forward_alone() -> None:
    class OnTheInput(ThreeLayers):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                fixed = Binarized.apply(self.a(x))
            return self.rest(self.a(Reversed.apply(x, 1.0)) + fixed)

    found = _assert_trained_exactly(OnTheInput())
    assert not any(node.backward for node in found.graph.nodes)


def test_a_hook_that_reads_what_the_forward_computed_gets_it_in_whichever_stage_it_is() -> None:
    class Masks(ThreeLayers):
        def forward(self, x: Tensor) -> Tensor:
            mask = x > 0
            hidden = self.a(x)
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: gradient * mask * hidden.sigmoid())
            return self.rest(torch.tanh(self.b(hidden)))

    _assert_trained_exactly(Masks())


# Backward passes that have no form in a graph. The error names each of them and the reason.


class _Numpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.from_numpy(np.abs(gradient.numpy()))


class _Foreign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.fft.fft(gradient).real


class _Draws(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.rand_like(gradient)


class _Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        ctx.count = count
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.count.add_(1)
        return gradient, None


class _Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Calls(ThreeLayers):
    count: Tensor

    def __init__(self, function: Any, *more: str) -> None:
        super().__init__()
        self.function, self.more = function, more
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        more = [getattr(self, name) for name in self.more]
        return self.rest(self.function.apply(torch.tanh(self.a(x)), *more))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: Calls(_Numpy), r"the backward pass of _Numpy at .*test_own_gradients.py:\d+ cannot be captured at "),
        (lambda: Calls(_Foreign), r"the backward pass of _Foreign at .* uses the operator aten.fft_fft.default"),
        (lambda: Calls(_Draws), r"the backward pass of _Draws at .* it draws random numbers"),
        (lambda: Calls(_Counts, "count"), r"the backward pass of _Counts at .* changes a value of the model in place"),
        (lambda: Calls(_Dirty), r"_Dirty at .* it changes its arguments in place \(ctx.mark_dirty\)"),
    ],
)
def test_a_backward_pass_that_has_no_form_is_refused_by_its_name(model: Callable[[], nn.Module], reason: str) -> None:
    _refused(model(), reason)


def _watch(*gradients: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("register", "reason"),
    [
        (lambda m: m.a.weight.register_hook(_watch), r"hook _watch at .*:\d+ on the parameter a.weight .* no gradient"),
        (lambda m: m.a.weight.register_post_accumulate_grad_hook(_watch), r"_watch at .* on a.weight .* accumulated"),
        (lambda m: m.b.register_full_backward_hook(_watch), r"_watch at .* on a module Linear .* no gradient"),
        (lambda m: m.b.register_full_backward_pre_hook(_watch), r"_watch at .* on a module Linear .* no gradient"),
        (lambda m: m.b.register_full_backward_hook(lambda m, i, o: o), r"needs the gradient of another value"),
        (
            lambda m: m.b.register_backward_hook(_watch),
            r"_watch at .* on the module b .* use register_full_backward_hook",
        ),
        (
            lambda m: torch.autograd.graph.register_multi_grad_hook([m.a.weight, m.b.weight], _watch),
            r"register_multi_grad_hook on the parameter a.weight .* several gradients",
        ),
    ],
)
def test_a_hook_that_has_no_form_is_refused_by_its_name(register: Callable[[Any], Any], reason: str) -> None:
    model = ThreeLayers()
    register(model)
    _refused(model, reason)


def test_hooks_that_are_registered_with_each_forward_are_refused_and_not_left_behind() -> None:
    class Registers(ThreeLayers):
        def forward(self, x: Tensor) -> Tensor:
            self.a.weight.register_hook(lambda gradient: gradient * 2)
            return self.rest(self.a(x))

    model = Registers()
    _refused(model, "each forward registers it again")
    model.a.weight.sum().backward()
    assert model.a.weight.grad is not None and bool((model.a.weight.grad == 1).all())


@pytest.mark.parametrize("kind", ["grad_fn", "saved", "checkpoint"])
def test_what_changes_gradients_unseen_is_found_by_the_comparison(kind: str) -> None:
    class Unseen(ThreeLayers):
        def forward(self, x: Tensor) -> Tensor:
            from torch.utils.checkpoint import checkpoint

            if kind == "checkpoint":
                return self.c(torch.tanh(checkpoint(self.b, x, use_reentrant=True) + self.a(x)))
            if kind == "saved":
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
                    return self.rest(self.a(x))
            hidden = self.a(x)
            if hidden.grad_fn is not None:
                hidden.grad_fn.register_hook(lambda into, out: tuple(2 * g if g is not None else g for g in into))
            return self.rest(hidden)

    reason = (
        r"the gradient of (a|b|c)\.(weight|bias) at .*test_own_gradients.py:\d+ .* in the captured graph has the norm"
    )
    _refused(Unseen(), reason)


def test_a_buffer_that_becomes_another_one_is_named() -> None:
    class Hides(ThreeLayers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            if self.training and not torch.compiler.is_exporting():
                self.seen.add_(hidden.detach().mean(0))
            return self.rest(hidden)

    _refused(Hides(), "in training the buffer seen gets another value")


# Malformed backward passes, which a stranger may send.


@pytest.mark.parametrize(
    ("alter", "reason"),
    [
        (lambda n: n.pop("backward"), "must be py.own_gradient to have a backward pass"),
        (lambda n: n.update(op="py.getitem"), "must be py.own_gradient to have a backward pass"),
        (lambda n: n["backward"].update(gradients=[]), "does not have the gradients and values"),
        (lambda n: n["backward"].update(yields=[]), "does not have the gradients and values"),
        (lambda n: n["backward"].update(saved=["s0", "s1", "s2", "s3"]), "does not have the gradients and values"),
        (lambda n: n["args"].append(1), "does not have the gradients and values"),
        (lambda n: n["args"].__setitem__(0, [1]), "does not have the gradients and values"),
        (lambda n: n.update(kwargs={"x": 1}), "does not have the gradients and values"),
        (lambda n: n["backward"].update(saved=["g0"] * len(n["backward"]["saved"])), "defines a name twice"),
        (lambda n: n["backward"].update(yields=["nowhere"]), "should yield 'nowhere'"),
        (lambda n: n["backward"]["nodes"][0].update(op="aten.from_file.default"), "not on the allow-list"),
        (lambda n: n["backward"]["nodes"][0].update(name="g0"), "defines 'g0' twice"),
        (lambda n: n["backward"]["nodes"][0].update(name="a b"), "not a valid name"),
        (lambda n: n["backward"]["nodes"][0].update(args=[{"ref": "inputs"}]), "uses 'inputs' before it exists"),
        (
            lambda n: n["backward"]["nodes"][0].update(backward={**n["backward"], "nodes": []}),
            "a backward pass of its own",
        ),
        (lambda n: n["backward"]["nodes"][0].update(op="aten.rand_like.default"), "not allowed in a backward pass"),
        (lambda n: n["backward"]["nodes"][0].update(op="aten.neg_.default"), "changes a value in place"),
        (lambda n: n["backward"].update(nodes={}), "no valid nodes"),
        (lambda n: n.update(backward=[]), "no valid backward pass"),
        (
            lambda n: n.update(evaluation={"op": "aten.system.default", "args": []}),
            "does not have|not on the allow-list",
        ),
    ],
)
def test_a_malformed_backward_pass_is_refused_with_the_reason(alter: Callable[[Any], Any], reason: str) -> None:
    class Hook(ThreeLayers):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            return self.rest(Binarized.apply(hidden))

    batch = _batch()
    data = json.loads(capture(Hook(), F.mse_loss, {}, [batch]).graph.to_json())
    node = next(n for n in data["nodes"] if "backward" in n)
    assert read_graph(json.dumps(data)).to_json() == json.dumps(data, separators=(",", ":"))
    alter(node)
    with pytest.raises(GraphError, match=reason):
        read_graph(json.dumps(data))


def test_an_evaluation_form_is_checked_as_any_operator_is() -> None:
    data = json.loads(example("TrainsOtherwise").graph.to_json())
    node = next(n for n in data["nodes"] if "evaluation" in n)
    for form, reason in (
        ({"op": "aten.from_file.default", "args": []}, "not on the allow-list"),
        ({"op": "py.own_gradient", "args": [[], [], []]}, "a backward pass in evaluation"),
        ({"op": "aten.alias.default", "args": [{"ref": "nowhere"}]}, "before it exists"),
        ({"op": "aten.ones.default", "args": [[2]], "kwargs": {"device": "meta"}}, "names a device"),
        ([], "no valid evaluation"),
    ):
        node["evaluation"] = form
        with pytest.raises(GraphError, match=reason):
            read_graph(json.dumps(data))


def _batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 8), torch.randn(6, 8)


def _refused(model: nn.Module, reason: str) -> None:
    batch = _batch()
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(model, F.mse_loss, {}, [batch, batch])
    assert "\n" not in str(caught.value)


def _assert_trained_exactly(model: nn.Module) -> Captured:
    batch = _batch()
    found = capture(model, F.mse_loss, {}, [batch, (batch[0][:3], batch[1][:3])])
    F.mse_loss(model(batch[0]), batch[1]).backward()
    want = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for places in ([], *([cut] for cut in layout(found.graph).cuts)):
        have: Outcome = run(found, places, batch)
        assert have.gradients.keys() == want.keys()
        for key, gradient in want.items():
            torch.testing.assert_close(have.gradients[key], gradient, rtol=1e-6, atol=1e-8)
    return found

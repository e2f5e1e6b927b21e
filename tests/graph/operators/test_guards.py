"""Checks in front of kernels: what a model may ask for passes, and the rest ends with the reason."""

import warnings
from typing import Any

import pytest
import torch

from ravnest.errors import GraphError
from ravnest.graph.operators.allowed import OVERLOADS
from ravnest.graph.operators.calls import Call
from ravnest.graph.operators.guards import refusal, shape_guard, value_guard
from ravnest.graph.operators.signatures import parameters_of
from ravnest.graph.ops import resolve
from ravnest.graph.portable import Node, PortableGraph, Ref, ValueSpec
from ravnest.graph.program import Program
from tests.fuzz.graphs.cases import CALLS, Case, Given
from tests.fuzz.graphs.trial import run


def refused(op: str, *args: Any, **kwargs: Any) -> str:
    call = Call(op, parameters_of(resolve(op)), args, kwargs)
    return refusal(shape_guard(op), call) or refusal(value_guard(op), call)


@pytest.mark.parametrize("op", sorted(OVERLOADS))
def test_a_valid_call_of_every_operator_runs(op: str) -> None:
    """Read from JSON, checked and held to a limit, as on a provider."""
    ended = []
    for args, kwargs in CALLS[op]:
        made = Case(0)
        node = {"name": "n", "op": op, "args": given(made, args), "kwargs": given(made, kwargs)}
        made.nodes.append({**node, "seed": 0})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ended.append(run(made, None).ended)
    assert "" in ended, ended


def given(made: Case, argument: Any) -> Any:
    if isinstance(argument, list):
        return [given(made, a) for a in argument]
    if not isinstance(argument, dict):
        return argument
    if "t" not in argument:
        return {k: given(made, a) for k, a in argument.items() if k != "pin_memory"}
    name = f"g{len(made.given)}"
    made.given[name] = Given(*argument["t"])
    return {"ref": name}


def test_labels_behind_the_last_one_may_be_anything() -> None:
    scores = torch.randn(6, 2, 5)
    labels = torch.tensor([[1, 2, -1, -1], [3, 1, 2, 99]])
    assert refused("aten.ctc_loss.IntList", scores, labels, [6, 6], [2, 3]) == ""
    assert "labels outside the" in refused("aten.ctc_loss.IntList", scores, labels, [6, 6], [3, 3])
    assert "beyond the 4 labels" in refused("aten.ctc_loss.IntList", scores, labels, [6, 6], [2, 5])
    assert "beyond its 6 steps" in refused("aten.ctc_loss.IntList", scores, labels, [6, 7], [2, 3])


@pytest.mark.parametrize("op", ["aten.remainder.Scalar", "aten.floor_divide.Scalar", "aten.fmod.Scalar"])
def test_the_smallest_whole_number_is_not_divided_by_minus_one(op: str) -> None:
    assert "smallest integer" in refused(op, torch.tensor([3, -(2**63)]), -1)
    assert refused(op, torch.tensor([3, -(2**63)]), -2) == ""
    assert refused(op, torch.tensor([3, -4]), -1) == ""
    assert refused(op, torch.tensor([3.0, -(2.0**63)]), -1) == ""


def test_a_small_picture_may_be_stepped_over() -> None:
    small, one = torch.randn(2, 3, 1, 1), torch.randn(4, 3, 1, 1)
    assert refused("aten.conv2d.default", small, one, None, [2, 2]) == ""
    assert "steps beyond its input" in refused("aten.conv2d.default", small, one, None, [4096, 1])
    assert "no room for its window" in refused("aten.conv2d.default", small, torch.randn(4, 3, 3, 3))


def test_a_scale_fits_the_sizes() -> None:
    picture = torch.randn(1, 2, 5, 5)
    assert refused("aten.upsample_nearest2d.vec", picture, None, [1.5, 2.0]) == ""
    assert refused("aten.upsample_nearest2d.vec", picture, [7, 9], None) == ""
    assert refused("aten.upsample_nearest2d.default", picture, [7, 10], 1.5, 2.0) == ""
    assert "does not fit its sizes" in refused("aten.upsample_nearest2d.default", picture, [7, 10], 1.0, 2.0)
    assert "both a size and scales" in refused("aten.upsample_nearest2d.vec", picture, [7, 9], [1.5, 2.0])
    assert "gives a scale of nan" in refused("aten.upsample_nearest2d.vec", picture, None, [float("nan"), 2.0])


def test_offsets_of_bags_rise_to_the_number_of_indices() -> None:
    weight, indices = torch.randn(10, 4), torch.tensor([1, 2, 9])
    assert refused("aten.embedding_bag.default", weight, indices, torch.tensor([0, 0, 2])) == ""
    for offsets in ([0, 4], [1, 2], [0, 2, 1], [0, -1]):
        assert "do not increase" in refused("aten.embedding_bag.default", weight, indices, torch.tensor(offsets))
    assert "outside the 10 rows" in refused("aten.embedding_bag.default", weight, indices + 1, torch.tensor([0]))


def test_a_computed_number_is_held_to_the_range_of_its_argument() -> None:
    nodes = (
        Node("size", "aten.sym_size.int", (Ref("x"), 0)),
        Node("large", "py.mul", (Ref("size"), 2**40)),
        Node("n", "aten.avg_pool1d.default", (Ref("x"), (Ref("large"),))),
    )
    graph = PortableGraph(nodes, inputs=(ValueSpec("x", torch.float32, (3, 2, 8)),), loss="n")
    with pytest.raises(GraphError, match="'kernel_size' is 3298534883328; it takes"):
        Program(graph).run({"x": torch.randn(3, 2, 8)}, {}, train=True)


def test_a_tensor_is_no_plain_number() -> None:
    graph = PortableGraph(
        (Node("n", "aten.softmax.int", (Ref("x"), Ref("d"))),),
        inputs=(ValueSpec("x", torch.float32, (3,)), ValueSpec("d", torch.int64, ())),
        loss="n",
    )
    with pytest.raises(GraphError, match="'dim' is a Tensor instead of a plain number"):
        Program(graph).run({"x": torch.randn(3), "d": torch.tensor(0)}, {}, train=True)


def test_what_another_node_saved_keeps_its_form() -> None:
    nodes = (
        Node("product", "aten.mm.default", (Ref("x"), Ref("y"))),
        Node("turned", "aten.t_.default", (Ref("x"),)),
        Node("loss", "aten.sum.default", (Ref("product"),)),
    )
    specs = (ValueSpec("x", torch.float32, (2, 3)), ValueSpec("y", torch.float32, (3, 4)))
    x, y = torch.randn(2, 3), torch.randn(3, 4, requires_grad=True)
    graph = PortableGraph(nodes, inputs=specs, sends=(ValueSpec("turned", torch.float32, (3, 2)),), loss="loss")
    results = Program(graph).run({"x": x, "y": y}, {}, train=True)
    assert results["turned"].shape == (3, 2)
    assert x.shape == (2, 3)
    (gradient,) = torch.autograd.grad(results["loss"], [y])
    assert torch.allclose(gradient, x.sum(0)[:, None].expand(3, 4))


def test_a_graph_that_is_checked_before_each_call_is_not_compiled() -> None:
    node = Node("n", "aten.floor_divide.default", (Ref("x"), Ref("x")))
    graph = PortableGraph((node,), inputs=(ValueSpec("x", torch.int64, (3,)),), loss="n")
    program = Program(graph, compiled=True)
    assert program.not_compiled.startswith("the arguments of aten.floor_divide.default have to be checked")
    assert program.run({"x": torch.tensor([2, 4, 7])}, {}, train=True)["n"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("divisor", "is_checked"), [(2, False), (0.5, False), (-1, True), (Ref("x"), True)])
def test_a_fixed_divisor_needs_no_check_at_every_call(divisor: Any, is_checked: bool) -> None:
    assert (value_guard("aten.floor_divide.default", divisor) is not None) == is_checked
    assert (value_guard("aten.div.Tensor_mode", divisor) is not None) == is_checked

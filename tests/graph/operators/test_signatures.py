"""Arguments of a node against its operator's signature, when a graph is read."""

import json
import re
from typing import Any

import pytest
import torch

from ravnest.errors import GraphError
from ravnest.graph import ops
from ravnest.graph.operators.allowed import OVERLOADS
from ravnest.graph.operators.python_numbers import FUNCTIONS
from ravnest.graph.portable import Device, Node, Ref
from ravnest.graph.portable_check import check_node

X, Y = Ref("x"), Ref("y")


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (Node("n", "aten.zeros.default", ((2,),), {"dtype": 128}), "'dtype' 128, which is no element type"),
        (Node("n", "aten.zeros.default", ((2,),), {"layout": 1}), "'layout' 1, which is no layout"),
        (Node("n", "aten.clone.default", (X,), {"memory_format": 3}), "which is no memory format"),
        (Node("n", "aten.to.dtype", (X, 6)), "which is no element type"),
        (Node("n", "aten.zeros.default", ((2,),), {"device": "cuda:1"}), "names a device; the stage chooses it"),
        (Node("n", "aten.zeros.default", ((2,),), {"pin_memory": True}), "pinned memory"),
        (Node("n", "aten.bernoulli.default", (X,), {"generator": 3}), "a generator, but a stage uses its own"),
        (Node("n", "aten.mse_loss.default", (X, Y, 9)), "'reduction' 9, which the operator does not know"),
        (Node("n", "aten.mse_loss.default", (X, Y, float("inf"))), "which is no integer"),
        (Node("n", "aten.mse_loss.default", (X, Y, True)), "which is no integer"),
        (Node("n", "aten.grid_sampler_2d.default", (X, Y, 3, 0, False)), "which the operator does not know"),
        (Node("n", "aten.grid_sampler_3d.default", (X, Y, 2, 0, False)), "which the operator does not know"),
        (Node("n", "aten.embedding_bag.default", (X, Y, Y, False, 3)), "which the operator does not know"),
        (Node("n", "aten.gelu.default", (X,), {"approximate": "wild"}), "which the operator does not know"),
        (Node("n", "aten.pad.default", (X, (1, 1), "wrap")), "which the operator does not know"),
        (Node("n", "aten.conv2d.padding", (X, Y, None, (1, 1), "full")), "which the operator does not know"),
        (Node("n", "aten.scatter.reduce", (X, 0, Y, X), {"reduce": "sum"}), "which the operator does not know"),
        (Node("n", "aten.einsum.default", ("ij$", (X,))), "which the operator does not know"),
        (Node("n", "aten.div.Tensor_mode", (X, Y), {"rounding_mode": "up"}), "which the operator does not know"),
        (Node("n", "aten.softmax.int", (X, 64)), "it takes -64 to 63"),
        (Node("n", "aten.max_pool1d.default", (X, (2,), (1,), (0,), (2**62,))), "it takes -16777216 to 16777216"),
        (Node("n", "aten.zeros.default", ((2**41,),)), "it takes"),
        (Node("n", "aten.zeros.default", ((1,) * 65,)), "a list of 65 entries; it takes at most 64"),
        (Node("n", "aten.add.Tensor", (X, 2**63)), "more than 64 bits"),
        (Node("n", "aten.add.Tensor", (X, "y")), "which is no tensor"),
        (Node("n", "aten.relu.default", (3,)), "which is no tensor"),
        (Node("n", "aten.relu.default", (None,)), "but it is required"),
        (Node("n", "aten.relu.default", ()), "gives aten.relu.default no argument 'self'"),
        (Node("n", "aten.relu.default", (X, Y)), "2 positional arguments, but it takes 1"),
        (Node("n", "aten.relu.default", (X,), {"self": Y}), "the argument 'self' twice"),
        (Node("n", "aten.relu.default", (X,), {"out": Y}), "'out', which it does not have"),
        (Node("n", "aten.cat.default", ((X, None),)), "a list with a missing entry"),
        (Node("n", "aten.cat.default", ((X, 1),)), "which is no tensor"),
        (Node("n", "aten.to.dtype", (X, Y)), "it must be a fixed element type"),
        (Node("n", "py.mul", (2,)), "takes 2 arguments, not 1"),
        (Node("n", "py.add", (2, "x")), "plain numbers"),
        (Node("n", "py.neg", (X,), {"a": 1}), "no keyword arguments"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused_with_the_reason(node: Node, reason: str) -> None:
    with pytest.raises(GraphError, match=re.escape(reason)):
        check_node(node)


@pytest.mark.parametrize(
    "node",
    [
        Node(
            "n", "aten.zeros.default", ((2, Ref("size")),), {"dtype": torch.float16, "device": Device(), "layout": None}
        ),
        Node("n", "aten.index.Tensor", (X, (None, Y))),
        Node("n", "aten.conv2d.default", (X, Y, None, (1, 1), (0, 0))),
        Node("n", "aten.sum.dim_IntList", (X, (-1,), True)),
        Node("n", "aten.slice.Tensor", (X, 1, 0, 2**63 - 1)),
        Node("n", "aten.upsample_nearest2d.vec", (X, None, (2.0, 2))),
        Node("n", "aten.add.Tensor", (X, 1), {"alpha": 0.5}),
        Node("n", "aten.rrelu.default", (X, 0.1, 0.3, True, None)),
    ],
)
def test_what_capture_writes_fits(node: Node) -> None:
    check_node(node)


@pytest.mark.parametrize(
    "op",
    [
        *("aten._unsafe_view.default", "aten.add.out", "aten.rand.generator", "aten.remainder.int", "aten.eq.str"),
        *("aten.to.prim_Device", "aten.sum.dim_DimnameList", "aten.index.Tensor_hacked_twin", "aten.copy.Dict_Tensor"),
        *("aten.empty.memory_format", "aten.as_strided.default", "aten.add", "add.Tensor", "aten.add.Tensor.x"),
    ],
)
def test_an_overload_that_export_does_not_emit_is_not_allowed(op: str) -> None:
    assert not ops.is_allowed(op)
    with pytest.raises(GraphError, match="allow-list"):
        ops.resolve(op)


def test_no_allowed_operator_writes_elsewhere_draws_elsewhere_or_does_without_tensors() -> None:
    for op in OVERLOADS:
        schema = ops.resolve(op)._schema  # type: ignore[attr-defined]
        assert not any(argument.is_out for argument in schema.arguments), op
        assert "Dimname" not in str(schema), op
        tensors = [argument for argument in (*schema.arguments, *schema.returns) if "Tensor" in str(argument.type)]
        assert tensors, op


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        *(("py.mul", (2**40, 2**40)), ("py.add", (2**63 - 1, 1)), ("py.sub", (-(2**63), 1)), ("py.neg", (-(2**63),))),
        *(("py.floordiv", (1, 0)), ("py.mod", (1, 0)), ("py.truediv", (1, 0)), ("py.sym_int", (float("inf"),))),
        *(("py.sym_int", (float("nan"),)), ("py.sym_int", (1e300,)), ("py.mul", ("a", 10**6)), ("py.mul", ((1,), 9))),
        *(("py.getitem", ((1, 2), 2)), ("py.getitem", ("text", 0)), ("py.getitem", ((1, 2), "0"))),
        ("py.eq", (torch.zeros(2), 1)),
    ],
)
def test_arithmetic_on_sizes_stays_within_64_bits(name: str, numbers: tuple[Any, ...]) -> None:
    with pytest.raises(GraphError) as raised:
        FUNCTIONS[name](*numbers)
    assert name in str(raised.value)


def test_arithmetic_on_sizes_is_pythons_own() -> None:
    assert FUNCTIONS["py.floordiv"](-7, 2) == -4
    assert FUNCTIONS["py.mod"](-7, 2) == 1
    assert FUNCTIONS["py.sym_max"](3, 5) == 5
    assert FUNCTIONS["py.sym_float"](3) == 3.0
    assert json.dumps(FUNCTIONS["py.truediv"](7, 2)) == "3.5"

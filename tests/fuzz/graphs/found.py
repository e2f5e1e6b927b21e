"""Findings of the graph fuzzer: each graph once crashed its process, hung, or exposed the contents of memory."""

from typing import Any, Final

from tests.fuzz.graphs.cases import Case, Given

_REF: Final = {name: {"ref": name} for name in "abcdefg"}
A, B, C, D, E, F, G = _REF.values()


def _real(*shape: int, grad: bool = True) -> Given:
    return Given("float32", list(shape), grad=grad)


def _whole(values: Any) -> Given:
    shape, inner = [], values
    while isinstance(inner, list):
        shape.append(len(inner))
        inner = inner[0] if inner else None
    return Given("int64", shape, values)


def _node(op: str, *args: Any, **kwargs: Any) -> tuple[str, list[Any], dict[str, Any]]:
    return f"aten.{op}", list(args), kwargs


def _picked(node: str, place: int) -> tuple[str, list[Any], dict[str, Any]]:
    return "py.getitem", [{"ref": node}, place], {}


_LSTM: Final = [_real(12, 3), _real(12, 3), _real(12), _real(12)]
_SCORES: Final = _real(6, 2, 5)

CRASHES: Final[dict[str, tuple[list[Given], list[Any]]]] = {
    "an element type as a number": ([], [_node("zeros.default", [2], dtype=128)]),
    "a layout as a number": ([], [_node("zeros.default", [2], layout=9)]),
    "a memory format as a number": ([_real(2, 3)], [_node("clone.default", A, memory_format=77)]),
    "labels of ctc_loss that are no classes": (
        [_SCORES, _whole([[10**6, 2, 3], [2, 3, 1]])],
        [_node("ctc_loss.IntList", A, B, [6, 6], [3, 2])],
    ),
    "labels of ctc_loss below zero": (
        [_SCORES, _whole([[-5, -6, -7], [-8, -9, -10]])],
        [_node("ctc_loss.IntList", A, B, [6, 6], [3, 2], 0, 0)],
    ),
    "lengths of ctc_loss beyond its labels": (
        [_SCORES, _whole([[1, 2, 3], [2, 3, 1]])],
        [_node("ctc_loss.IntList", A, B, [6, 6], [3, 4000])],
    ),
    "lengths of ctc_loss beyond its steps": (
        [_SCORES, _whole([[1, 2, 3], [2, 3, 1]]), _whole([6, 100_000]), _whole([3, 2])],
        [_node("ctc_loss.Tensor", A, B, C, D)],
    ),
    "repeat_interleave into more places than there are": (
        [_real(4, 1), _whole([0, 1, 2, 3])],
        [_node("repeat_interleave.self_Tensor", A, B, 0, output_size=2**31)],
    ),
    "_weight_norm with scales of another size": ([_real(40, 3), _real(1, 1)], [_node("_weight_norm.default", A, B, 0)]),
    "_weight_norm backward with other dimensions": (
        [_real(5, 5), _real(4, 1, 1)],
        [_node("_weight_norm.default", A, B, 0)],
    ),
    "lstm with an input of four dimensions": (
        [_real(5, 2, 2, 3), _real(1, 2, 3), _real(1, 2, 3), *_LSTM],
        [_node("lstm.input", A, [B, C], [D, E, F, G], True, 1, 0.0, True, False, False)],
    ),
    "lstm with a state for another batch": (
        [_real(5, 2, 3), _real(1, 9, 3), _real(1, 9, 3), *_LSTM],
        [_node("lstm.input", A, [B, C], [D, E, F, G], True, 1, 0.0, True, False, False)],
    ),
    "lstm with weights of another width": (
        [_real(5, 2, 7), _real(1, 2, 3), _real(1, 2, 3), *_LSTM],
        [_node("lstm.input", A, [B, C], [D, E, F, G], True, 1, 0.0, True, False, False)],
    ),
    "lstm packed beyond its data": (
        [_real(6, 3), _whole([200, 2, 2]), _real(1, 2, 3), _real(1, 2, 3), *_LSTM[:3]],
        [_node("lstm.data", A, B, [C, D], [E, F, G, G], True, 1, 0.0, True, False)],
    ),
    "gru with too few weights": (
        [_real(5, 2, 3), _real(1, 2, 3), _real(9, 3), _real(9, 3)],
        [_node("gru.input", A, B, [C, D], True, 1, 0.0, True, False, False)],
    ),
    "rnn_tanh packed for another batch": (
        [_real(6, 3), _whole([-1, 5, 2]), _real(1, 2, 3), _real(3, 3), _real(3, 3)],
        [_node("rnn_tanh.data", A, B, C, [D, E], False, 1, 0.0, True, False)],
    ),
    "rnn_relu with weights of other sizes": (
        [_real(5, 2, 3), _real(1, 2, 3), _real(9, 3), _real(3, 9)],
        [_node("rnn_relu.input", A, B, [C, D], False, 1, 0.0, True, False, False)],
    ),
    "an unknown mode of grid_sampler": (
        [_real(1, 2, 4, 4), _real(1, 3, 3, 2)],
        [_node("grid_sampler_2d.default", A, B, 9, 0, False)],
    ),
    "an unknown padding of grid_sampler": (
        [_real(1, 2, 4, 4), _real(1, 3, 3, 2)],
        [_node("grid_sampler.default", A, B, 0, 7, False)],
    ),
    "endless coordinates for grid_sampler": (
        [_real(2, 1, 5, 20), Given("float32", [2, 13, 10, 2], fill="inf", grad=True)],
        [_node("grid_sampler_2d.default", A, B, 0, 2, False)],
    ),
    "attention to more values than keys": (
        [_real(1, 4, 4, 3), _real(1, 2, 4, 3), _real(1, 2, 5, 3)],
        [_node("scaled_dot_product_attention.default", A, B, C, enable_gqa=True)],
    ),
    "native_group_norm with sizes that are not its input's": (
        [_real(2, 4, 3), _real(4), _real(4)],
        [_node("native_group_norm.default", A, B, C, 2, 4, 3000, 2, 1e-5)],
    ),
    "offsets of embedding_bag beyond its indices": (
        [_real(10, 4), _whole([1, 2, 3]), _whole([0, 4000])],
        [_node("embedding_bag.default", A, B, C)],
    ),
    "offsets of embedding_bag below zero": (
        [_real(10, 4), _whole([1, 2, 3]), _whole([-7, 2])],
        [_node("embedding_bag.default", A, B, C, False, 2)],
    ),
    "upsample_nearest2d with a scale of another size": (
        [_real(1, 2, 4, 4)],
        [_node("upsample_nearest2d.default", A, [7, 7], 1e-4, 1e-4)],
    ),
    "upsample_nearest2d with a scale below zero": (
        [_real(1, 2, 4, 4)],
        [_node("upsample_nearest2d.default", A, [7, 7], -2.0, -2.0)],
    ),
    "max_pool1d with a huge dilation": (
        [_real(2, 3, 8)],
        [_node("max_pool1d.default", A, [2], [1], [0], [2**62], True)],
    ),
    "col2im with a huge size": (
        [_real(1, 8, 9)],
        [_node("col2im.default", A, [2**31, 2**31], [2, 2], [1, 1], [0, 0], [1, 1])],
    ),
    "remainder of plain numbers": ([], [_node("remainder.int", 5, 0)]),
    "the smallest whole number divided by -1": (
        [_whole([-(2**63), 1])],
        [_node("remainder.Scalar", A, -1), _node("floor_divide.default", A, -1)],
    ),
    "conv3d in steps of zero": (
        [_real(1, 2, 3, 4, 4), _real(4, 2, 2, 2, 2)],
        [_node("conv3d.default", A, B, None, [0, 0, 0])],
    ),
    "conv3d without channels": (
        [_real(1, 0, 3, 4, 4), _real(0, 0, 2, 2, 2)],
        [_node("conv3d.default", A, B, None, [1, 1, 1], [0, 0, 0], [1, 1, 1], 0)],
    ),
    "a convolution that steps far beyond its input": (
        [_real(2, 3, 8), _real(4, 3, 3, grad=False)],
        [_node("convolution.default", A, B, None, [32768], [0], [1], False, [0], 1)],
    ),
    "out= over its own input": ([_real(4, grad=False)], [_node("add.out", A, A, out=A)]),
    "_unsafe_view over saved indices": ([_real(2, 3)], [_node("_unsafe_view.default", A, [6])]),
    "saved indices of max_pool2d overwritten": (
        [_real(1, 2, 4, 4)],
        [
            _node("max_pool2d_with_indices.default", A, [2, 2]),
            _picked("n0", 1),
            _node("detach.default", {"ref": "n1"}),
            _node("fill_.Scalar", {"ref": "n2"}, 10**7),
            _picked("n0", 0),
        ],
    ),
    "saved values that change their form": (
        [_real(2, 3, 8), _real(4, 3, 3), _real(2, 3, 8, grad=False)],
        [_node("conv1d.default", C, B), _node("transpose_.default", C, 0, 2), _node("mul.Tensor", A, 2.0)],
    ),
    "targets of binary_cross_entropy of another size": (
        [_real(1), _real(0)],
        [_node("binary_cross_entropy.default", A, B)],
    ),
    "a bool of other bytes": (
        [Given("uint8", [6], [7, 9, 200, 3, 255, 2])],
        [_node("view.dtype", A, {"dtype": "bool"}), _node("masked_select.default", {"ref": "n0"}, {"ref": "n0"})],
    ),
    "a plain number squared again and again": (
        [_real(3)],
        [
            ("aten.sym_size.int", [A, 0], {}),
            *[("py.mul", [{"ref": f"n{i}"}, {"ref": f"n{i}"}], {}) for i in range(60)],
        ],
    ),
    "a plain number divided by zero": (
        [_real(0)],
        [_node("sym_size.int", A, 0), ("py.floordiv", [3, {"ref": "n0"}], {})],
    ),
    "a view of far more than is lent": (
        [_real(1)],
        [_node("expand.default", A, [2**38]), _node("index_select.default", {"ref": "n0"}, 0, B)],
    ),
    "a copy of an expanded view": (
        [_real(1)],
        [_node("expand.default", A, [4096, 4096]), _node("clone.default", {"ref": "n0"})],
    ),
    "doubling twenty-eight times": (
        [_real(4)],
        [_node("cat.default", [{"ref": f"n{i - 1}"} if i else A] * 2) for i in range(28)],
    ),
    "gradients of expanded views": (
        [_real(1), _whole([0])],
        [
            *[_node("expand.default", A, [3_000_000 + i]) for i in range(8)],
            *[_node("index_select.default", {"ref": f"n{i}"}, 0, B) for i in range(8)],
        ],
    ),
    "one_hot with a huge class": ([_whole([1, 2**40])], [_node("one_hot.default", A)]),
    "as many parts as there is no memory for": (
        [_real(1)],
        [_node("expand.default", A, [10_000_000]), _node("unbind.int", {"ref": "n0"}, 0)],
    ),
}


def found(name: str) -> Case:
    """The graph with this name."""
    given, nodes = CRASHES[name]
    made = Case(list(CRASHES).index(name), dict(zip("abcdefg", given, strict=False)))
    for place, (op, args, kwargs) in enumerate(nodes):
        made.nodes.append({"name": f"n{place}", "op": op, "args": args, "kwargs": kwargs})
    return made

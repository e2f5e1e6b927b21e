"""Train/eval switch: training and evaluation share one graph.

A graph is captured in training mode. `evaluation_form` gives a node as it runs in evaluation: dropout returns its
input, batch norm uses its running statistics, attention drops nothing.
"""

from collections.abc import Callable
from dataclasses import replace

from ravnest.graph import ops
from ravnest.graph.aliasing import written_names
from ravnest.graph.portable import Argument, Node, PortableGraph, Ref

# operator -> (position of the argument, its name, its value in evaluation)
_SWITCHES: dict[str, tuple[int, str, Argument]] = {
    "dropout": (2, "train", False),
    "dropout_": (2, "train", False),
    "alpha_dropout": (2, "train", False),
    "alpha_dropout_": (2, "train", False),
    "feature_dropout": (2, "train", False),
    "feature_dropout_": (2, "train", False),
    "feature_alpha_dropout": (2, "train", False),
    "feature_alpha_dropout_": (2, "train", False),
    "rrelu": (3, "training", False),
    "scaled_dot_product_attention": (4, "dropout_p", 0.0),
}
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_NORMS = frozenset({"batch_norm", "instance_norm"})


def evaluation_form(node: Node, is_state: Callable[[str], bool] = lambda name: False) -> Node:
    """The node as it runs in evaluation: its own evaluation form if it has one, otherwise the switched operator. An
    operator that would change the model's state (a running mean, a counter of batches) returns that state unchanged."""
    if node.evaluation is not None:
        form = node.evaluation
        return replace(node, op=form.op, args=form.args, kwargs=form.kwargs, evaluation=None)
    if ops.is_python(node.op):
        return node
    name = ops.short_name(node.op)
    if name in _SWITCHES:
        position, keyword, value = _SWITCHES[name]
        return _with_argument(node, position, keyword, value)
    if name in _RECURRENT:
        # (input, hx, params, has_biases, num_layers, dropout, train, …), shifted by one for packed sequences
        return _with_argument(node, 7 if node.op.endswith(".data") else 6, "train", False)
    if name in _NORMS:
        has_statistics = len(node.args) > 4 and node.args[3] is not None and node.args[4] is not None
        return _with_argument(node, 5, "training", False) if has_statistics else node
    for written in written_names(node):
        if is_state(written):
            return replace(node, op="aten.alias.default", args=(Ref(written),), kwargs={})
    return node


def draws_random_numbers(node: Node) -> bool:
    """Whether this node draws random numbers in training. A dropout with probability 0 does not."""
    if not ops.is_random(node.op):
        return False
    name = ops.short_name(node.op)
    if "dropout" in name:
        return _argument(node, 1, "p", None) != 0 and _argument(node, 2, "train", False) is not False
    if name == "rrelu":
        return _argument(node, 3, "training", False) is not False
    if name == "scaled_dot_product_attention":
        return _argument(node, 4, "dropout_p", 0.0) != 0
    if name in _RECURRENT:
        shift = 1 if node.op.endswith(".data") else 0
        return (
            _argument(node, 5 + shift, "dropout", None) != 0 and _argument(node, 6 + shift, "train", None) is not False
        )
    return True


def draws_in_evaluation(graph: PortableGraph) -> bool:
    """Whether the graph would draw random numbers in evaluation."""
    return any(draws_random_numbers(evaluation_form(node)) for node in graph.nodes)


def _argument(node: Node, position: int, keyword: str, default: Argument) -> Argument:
    return node.args[position] if position < len(node.args) else node.kwargs.get(keyword, default)


def _with_argument(node: Node, position: int, keyword: str, value: Argument) -> Node:
    if position < len(node.args):
        return replace(node, args=(*node.args[:position], value, *node.args[position + 1 :]))
    if keyword in node.kwargs:
        return replace(node, kwargs={**node.kwargs, keyword: value})
    return node

"""Checks of a portable graph: names, references, operators and their arguments.

A graph that fails one of them is a GraphError that names the node and the reason.
"""

from dataclasses import replace

from ravnest.errors import GraphError
from ravnest.graph import ops
from ravnest.graph.cutting.lookups import is_lookup, name_ahead
from ravnest.graph.operators.python_numbers import unfit_numbers
from ravnest.graph.operators.signatures import Forms, check_arguments
from ravnest.graph.portable import Backward, Device, Node, PortableGraph, Ref

MAX_NODES = 200_000

_FORMS = Forms(Ref, Device)


def check(graph: PortableGraph) -> None:
    """GraphError unless every name is defined once and before its use, and every operator is on the allow-list with
    arguments that fit it."""
    known: set[str] = set()
    for name in graph.given_names():
        if name in known:
            raise GraphError(f"the portable graph defines {name!r} twice")
        known.add(name)
    count = 0
    for node in graph.nodes:
        _check_node(node, known)
        if node.evaluation is not None:
            form = node.evaluation
            if form.op == ops.OWN_GRADIENT:
                raise GraphError(f"node {node.name!r} of the portable graph has a backward pass in evaluation")
            check_node(replace(node, op=form.op, args=form.args, kwargs=form.kwargs))
        if node.backward is not None:
            _check_backward(node, node.backward)
            count += len(node.backward.nodes)
        known.add(node.name)
    if count + len(graph.nodes) > MAX_NODES:
        raise GraphError(f"the portable graph has more than {MAX_NODES:,} nodes, including those of backward passes")
    _check_lookups(graph)
    wanted = [v.name for v in graph.sends] + list(graph.metrics.values()) + ([graph.loss] if graph.loss else [])
    for name in wanted:
        if name not in known:
            raise GraphError(f"the portable graph should yield {name!r}, but never computes it")


def _check_lookups(graph: PortableGraph) -> None:
    """GraphError unless the lookups are such operators on the graph's own parameters, in a leaf, and the rows go to a
    root."""
    if graph.rows and (graph.receives or graph.loss):
        raise GraphError("the portable graph gets looked-up rows, but is not the first of several stages")
    if graph.lookups and (graph.loss is None or not graph.receives):
        raise GraphError("the portable graph looks rows up for another stage, but is not the last of several stages")
    nodes, parameters = {node.name: node for node in graph.nodes}, {p.name: p for p in graph.parameters}
    for value in graph.lookups:
        node = nodes.get(name_ahead(value.name))
        if node is None or not is_lookup(node, parameters):
            raise GraphError(f"the portable graph should look up {value.name!r}, which is no lookup in its own weights")


def _check_node(node: Node, known: set[str]) -> None:
    """The checks of every operator call, in a forward or a backward pass."""
    if (node.op == ops.OWN_GRADIENT) != (node.backward is not None):
        raise GraphError(f"node {node.name!r} of the portable graph must be {ops.OWN_GRADIENT} to have a backward pass")
    check_node(node)
    for reference in node.references():
        if reference not in known:
            raise GraphError(f"node {node.name!r} of the portable graph uses {reference!r} before it exists")
    if node.name in known:
        raise GraphError(f"the portable graph defines {node.name!r} twice")


def check_node(node: Node) -> None:
    """GraphError unless the operator is on the allow-list and its arguments fit its signature."""
    operator = ops.resolve(node.op)
    if node.op == ops.OWN_GRADIENT:
        # _check_backward compares its three lists with its backward pass.
        return
    if not ops.is_python(node.op):
        check_arguments(node.name, node.op, operator, node.args, node.kwargs, _FORMS)
        return
    reason = unfit_numbers(node.op, node.args, node.kwargs, Ref)
    if reason:
        raise GraphError(f"node {node.name!r} of the portable graph: {reason}")


def _check_backward(node: Node, backward: Backward) -> None:
    """GraphError unless a backward pass defines each name once and before its use, is not nested, draws no random
    numbers, and writes into no value that it did not make itself."""
    where = f"the backward pass of node {node.name!r} of the portable graph"
    sizes = (len(backward.gradients), len(backward.yields), len(backward.saved))
    lists = [a for a in node.args if isinstance(a, tuple) and all(isinstance(item, Ref) for item in a)]
    if node.kwargs or node.evaluation or len(node.args) != 3 or tuple(len(a) for a in lists) != sizes:
        raise GraphError(f"{where} does not have the gradients and values that the node has")
    given = (*backward.gradients, *backward.saved)
    known = set(given)
    if len(known) != len(given):
        raise GraphError(f"{where} defines a name twice")
    foreign = {name: True for name in given}
    for inner in backward.nodes:
        _check_node(inner, known)
        if inner.backward is not None or inner.evaluation is not None or ops.is_random(inner.op):
            raise GraphError(f"{where} has the node {inner.name!r}, which is not allowed in a backward pass")
        if any(foreign[name] for position in ops.written_arguments(inner.op) for name in inner.references_at(position)):
            raise GraphError(f"{where} changes a value in place that it did not make")
        shared = [name for position in ops.aliased_arguments(inner.op) for name in inner.references_at(position)]
        foreign[inner.name] = any(foreign[name] for name in shared)
        known.add(inner.name)
    for name in backward.yields:
        if name is not None and name not in known:
            raise GraphError(f"{where} should yield {name!r}, but never computes it")

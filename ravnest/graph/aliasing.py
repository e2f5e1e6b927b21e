"""Alias analysis: which values of a graph share memory, and which operators write into it.

Both follow from the operators' schemas. Partition uses them so that no cut separates a value from an operator that
later changes it in place; evaluation uses them so that it does not change the model's state.
"""

from dataclasses import replace
from typing import Final

from ravnest.graph import ops
from ravnest.graph.portable import Node, PortableGraph

_HANDING_BACK: Final = frozenset(
    "alpha_dropout contiguous dropout feature_alpha_dropout feature_dropout lift_fresh to type_as".split()
)
"""Operators that return their argument itself if they have nothing to do."""


class Aliases:
    """Groups of names that may share memory. `group(name)` is the same for two names of one group."""

    def __init__(self, graph: PortableGraph) -> None:
        self._parent: dict[str, str] = {}
        for node in graph.nodes:
            for reference in aliased_names(node):
                self._parent[self.group(node.name)] = self.group(reference)

    def group(self, name: str) -> str:
        while (parent := self._parent.get(name, name)) != name:
            self._parent[name] = self._parent.get(parent, parent)
            name = self._parent[name]
        return name


def written_names(node: Node) -> list[str]:
    """Names of the values that this node changes in place, in training or in evaluation."""
    return [
        name
        for form in _forms(node)
        if not _is_frozen_norm(form)
        for position in ops.written_arguments(form.op)
        for name in form.references_at(position)
    ]


def aliased_names(node: Node) -> list[str]:
    """Names of the values that may share memory with this node's result, in training or in evaluation."""
    return [
        name
        for form in _forms(node)
        for position in ops.aliased_arguments(form.op)
        for name in form.references_at(position)
    ]


def handed_back_names(node: Node) -> list[str]:
    """Names of the values that this node may return themselves, not as views: those that it writes in place, and those
    that it has no reason to copy."""
    hands_back = not ops.is_python(node.op) and ops.short_name(node.op) in _HANDING_BACK
    return aliased_names(node) if hands_back else written_names(node)


def _forms(node: Node) -> list[Node]:
    """The node as it runs in training and, if it has an evaluation form, as it runs in evaluation."""
    if node.evaluation is None:
        return [node]
    form = node.evaluation
    return [
        replace(node, evaluation=None),
        replace(node, op=form.op, args=form.args, kwargs=form.kwargs, evaluation=None),
    ]


def _is_frozen_norm(node: Node) -> bool:
    """Whether this is a norm that reads its running statistics and does not update them."""
    if ops.is_python(node.op) or ops.short_name(node.op) not in _NORMS:
        return False
    return (node.args[5] if len(node.args) > 5 else node.kwargs.get(ops.argument_name(node.op, 5), True)) is False


_NORMS = frozenset({"batch_norm", "instance_norm"})

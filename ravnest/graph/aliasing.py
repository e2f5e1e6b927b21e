"""Which values of a graph share memory, and which operators write into it.

Cutting a model must never separate a value from an operator that later changes it in place, and evaluation must not
change the model's state. Both questions are answered here, once, from the operators' schemas.
"""

from typing import Final

from ravnest.graph import ops
from ravnest.graph.portable import Node, PortableGraph, Ref

_HANDING_BACK: Final = frozenset(
    """
    alpha_dropout contiguous dropout feature_alpha_dropout feature_dropout lift_fresh pad reshape reshape_as to type_as
    """.split()
)
"""Operators that yield their argument itself where nothing has to be done."""


class Aliases:
    """Groups of names that may share memory. `group(name)` is the same object for two names of one group."""

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
    """Names of the values this node changes in place."""
    return [name for position in ops.written_arguments(node.op) for name in _references_at(node, position)]


def aliased_names(node: Node) -> list[str]:
    """Names of the values whose memory this node's result may share."""
    return [name for position in ops.aliased_arguments(node.op) for name in _references_at(node, position)]


def handed_back_names(node: Node) -> list[str]:
    """Names of the values of which this node may yield the very one, not a view of it: what it writes in place, what
    it has no reason to copy."""
    hands_back = not ops.is_python(node.op) and ops.short_name(node.op) in _HANDING_BACK
    return aliased_names(node) if hands_back else written_names(node)


def _references_at(node: Node, position: int) -> list[str]:
    if position < len(node.args):
        argument = node.args[position]
    else:
        argument = node.kwargs.get(ops.argument_name(node.op, position))
    items = argument if isinstance(argument, tuple) else (argument,)
    return [item.name for item in items if isinstance(item, Ref)]

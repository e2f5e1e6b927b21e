"""Uses of weights: those whose gradients can be computed after all others at no extra cost, and those that no backward
reads.

The backward of a product or convolution consists of two independent products: one for the input, one for the weight.
The second can wait until the gradient of the input has been sent. If the weight was transposed, normalised or otherwise
computed from weights alone before its use, those operators wait as well. Every other use of a weight (a batch norm, a
bias that is added) keeps its place in the backward: it is cheap there, and shares work with the other gradients.
"""

from dataclasses import replace
from typing import Final

from ravnest.graph import ops
from ravnest.graph.aliasing import Aliases, written_names
from ravnest.graph.cutting.lookups import is_lookup, looked_up
from ravnest.graph.portable import Node, PortableGraph

_SEPARABLE: Final = frozenset(
    """
    addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution einsum
    embedding linear matmul mm tensordot
    """.split()
)
"""Operators that return one tensor in memory of its own, and whose gradients are computed independently."""


def weight_uses(graph: PortableGraph) -> dict[str, tuple[str, ...]]:
    """By the name of a node, its arguments whose gradients may wait: trained parameters, and values computed from
    parameters and constants alone."""
    aliases = Aliases(graph)
    written = {aliases.group(name) for node in graph.nodes for name in written_names(node)}
    constant = {spec.name for spec in graph.constants}
    weights = {spec.name for spec in graph.parameters if aliases.group(spec.name) not in written}
    uses: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        references = set(replace(node, evaluation=None).references())
        found = references & weights
        if not found:
            continue
        if references <= weights | constant and _is_plain(node) and aliases.group(node.name) not in written:
            weights.add(node.name)
        elif not ops.is_python(node.op) and ops.short_name(node.op) in _SEPARABLE and node.grad:
            uses[node.name] = tuple(sorted(found))
    return uses


def unread_weights(graph: PortableGraph) -> frozenset[str]:
    """The trained parameters that no backward reads: the gradient of a lookup needs the numbers of its rows alone."""
    specs = {spec.name: spec for spec in graph.parameters}
    aliases = Aliases(graph)
    written = {aliases.group(name) for node in graph.nodes for name in written_names(node)}
    looked_up_only = {name for name in specs if aliases.group(name) not in written}
    used: set[str] = set()
    for node in graph.nodes:
        lookup = looked_up(node) if is_lookup(node, specs) else None
        used.update(name for name in node.references() if name in specs)
        looked_up_only -= {name for name in node.references() if name != lookup}
    read = {*(value.name for value in graph.sends), *graph.metrics.values(), graph.loss}
    return frozenset((looked_up_only & used) - read)


def _is_plain(node: Node) -> bool:
    """Whether the result depends on the arguments alone and the node changes nothing else."""
    return not ops.is_random(node.op) and not ops.written_arguments(node.op)

"""Where a graph uses its weights so that their gradients can be computed after all others, and at no extra cost.

The backward of a product or a convolution is two products that share nothing: one for what came in, one for the weight.
So the second can wait until the first has been sent on. A weight may have been transposed, normed or otherwise computed
from weights alone before it is used: then that chain waits too. Every other use of a weight (a batch norm, a bias that
is added) keeps its place in the backward: it costs little there, and would share work with the rest if it came later.
"""

from dataclasses import replace
from typing import Final

from ravnest.graph import ops
from ravnest.graph.aliasing import Aliases, written_names
from ravnest.graph.portable import Node, PortableGraph

_SEPARABLE: Final = frozenset(
    """
    addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution einsum
    embedding linear matmul mm tensordot
    """.split()
)
"""One tensor comes out of each, in memory of its own, and each gradient of it is computed by itself."""


def weight_uses(graph: PortableGraph) -> dict[str, tuple[str, ...]]:
    """By the name of a node, the values it takes whose gradients may wait: trained parameters, and what was computed
    from these and constants alone."""
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


def _is_plain(node: Node) -> bool:
    """Whether what comes out depends on what goes in alone, and nothing else changes."""
    return not ops.is_random(node.op) and not ops.written_arguments(node.op)

"""Lookups: rows of a trained parameter that values of the batch alone select, such as the embedding of tokens.

A parameter with a lookup and further uses, such as an embedding that is tied to the head of a language model, belongs
to one stage. The others need its rows, never the parameter: the rows of a microbatch are as small as an activation, and
so is their gradient. So the owner computes every lookup of such a parameter:

- A lookup behind the first use moves to that use, and its rows cross the cuts from there, as any activation does.
- A lookup before the first other use goes *ahead*: the leaf, which has that use, looks the rows up before the
  microbatch begins and sends them to the root. No cut may follow that use then, so nothing larger than the parameter
  may be used first behind it.

A parameter whose other uses lie in several stages crosses the cuts between them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ravnest.graph.aliasing import Aliases, written_names
from ravnest.graph.portable import Node, PortableGraph, Ref, WeightSpec

LOOKUP: Final = "aten.embedding.default"
_INDICES, _PADDING, _BY_FREQUENCY = 1, 2, 3
"""Positions of the operator's arguments."""


class PlacedLookups(NamedTuple):
    """The line with every lookup at its place, and the lookups that go ahead of it."""

    line: tuple[Node, ...]
    ahead: tuple[Node, ...]
    first_use: int | None
    """Place in the line of the first use of a parameter that is looked up ahead: no cut may follow it."""


def place_lookups(graph: PortableGraph, shared: Mapping[str, Node], line: tuple[Node, ...]) -> PlacedLookups:
    """Takes the lookups of parameters with several uses out of the line, and puts them where their owner is."""
    found = _lookups(graph, shared, line)
    uses: dict[str, list[int]] = {p.name: [] for p in graph.parameters}
    for place, node in enumerate(line):
        for name in set(node.references()) & uses.keys():
            uses[name].append(place)
    specs = {p.name: p for p in graph.parameters}
    ahead: list[Node] = []
    moves: dict[str, list[Node]] = {}
    for name, lookups in found.items():
        others = [place for place in uses[name] if line[place] not in lookups]
        if not others:
            moves.setdefault(line[uses[name][0]].name, []).extend(lookups[1:])
            continue
        begin = others[0]
        behind = [node for node in lookups if line.index(node) > begin]
        if len(behind) == len(lookups):
            moves.setdefault(line[begin].name, []).extend(lookups)
        elif _bytes(s for s in specs.values() if uses[s.name] and uses[s.name][0] > begin) < _bytes([specs[name]]):
            ahead.extend(lookups)
    moved = {node.name for nodes in moves.values() for node in nodes} | {node.name for node in ahead}
    placed: list[Node] = []
    for node in line:
        if node.name not in moved:
            placed.extend([node, *moves.get(node.name, ())])
    tied = {looked_up(node) for node in ahead}
    first = next((place for place, node in enumerate(placed) if not tied.isdisjoint(node.references())), None)
    return PlacedLookups(tuple(placed), tuple(ahead), first)


def name_ahead(row: str) -> str:
    """The name of the leaf's lookup whose result is this value at the root: the leaf may receive that value too."""
    return f"{row}__ahead"


def looked_up(node: Node) -> str:
    """The parameter whose rows a lookup returns."""
    [name] = node.references_at(0)
    return name


def indices_of(node: Node) -> str:
    """The value with the numbers of the rows that a lookup returns."""
    [name] = node.references_at(_INDICES)
    return name


def padding_of(node: Node) -> int | None:
    """The row that gets no gradient; None if every row gets one."""
    padding = node.args[_PADDING] if len(node.args) > _PADDING else node.kwargs.get("padding_idx", -1)
    return padding if isinstance(padding, int) and padding >= 0 else None


def is_lookup(node: Node, parameters: Mapping[str, WeightSpec]) -> bool:
    """Whether a node selects rows of a trained parameter, with a gradient that is the sum over the rows."""
    by_frequency = node.args[_BY_FREQUENCY] if len(node.args) > _BY_FREQUENCY else node.kwargs.get("scale_grad_by_freq")
    return (
        node.op == LOOKUP
        and node.grad
        and node.evaluation is None
        and not by_frequency
        and len(node.args) > _INDICES
        and all(isinstance(argument, Ref) for argument in node.args[: _INDICES + 1])
        and looked_up(node) in parameters
    )


def _lookups(graph: PortableGraph, shared: Mapping[str, Node], line: Sequence[Node]) -> dict[str, list[Node]]:
    """By parameter with several uses, its lookups in order. The result of a lookup that is changed in place, and a
    parameter that is, stay where they are."""
    aliases = Aliases(graph)
    written = {aliases.group(name) for node in graph.nodes for name in written_names(node)}
    parameters = {p.name: p for p in graph.parameters}
    of_the_batch = {v.name for v in graph.inputs} | {c.name for c in graph.constants} | shared.keys()
    found: dict[str, list[Node]] = {}
    for node in line:
        if (
            is_lookup(node, parameters)
            and indices_of(node) in of_the_batch
            and aliases.group(node.name) not in written
            and aliases.group(looked_up(node)) not in written
        ):
            found.setdefault(looked_up(node), []).append(node)
    read = set(graph.metrics.values())
    counts = {name: sum(name in node.references() for node in line) for name in found}
    return {name: nodes for name, nodes in found.items() if counts[name] > 1 and name not in read}


def _bytes(specs: Iterable[WeightSpec]) -> int:
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)

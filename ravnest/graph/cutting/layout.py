"""Layout of a graph for partition: the places where it may be cut, and the values that cross each cut.

A graph has two kinds of nodes. *Shared* nodes are cheap functions of the batch alone (position ids, masks, sizes):
each stage that needs one recomputes it from the inputs, so its value never crosses a link. The other nodes, the *line*,
run in order, and a cut is a place between two of them. Values that are computed before a cut and used after it cross
the cut: activations, the rows of a tied weight (lookups.py), and trained parameters that both sides use in another way,
so that a tied weight remains one weight wherever the cut falls. At least one value has to cross, with or without a
gradient: a stage that sends nothing takes no part in a microbatch.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from ravnest.graph import ops
from ravnest.graph.aliasing import Aliases, handed_back_names, written_names
from ravnest.graph.cutting.lookups import PlacedLookups, place_lookups
from ravnest.graph.portable import Node, PortableGraph, ValueSpec
from ravnest.graph.switch import draws_random_numbers

_PICK = "py.getitem"


@dataclass(frozen=True, slots=True)
class Layout:
    """The line in order, and the places in it where a cut may fall (cut c: line[:c] | line[c:])."""

    line: tuple[Node, ...]
    shared: dict[str, Node]
    cuts: tuple[int, ...]
    crossing: dict[int, tuple[ValueSpec, ...]]
    """For every cut, the values that cross it; at least one."""
    first_use: dict[str, int]
    """For every trained parameter by name, the place of the first node that uses it. The stage of that node owns it."""
    state_use: dict[str, int]
    """The same for every state (a buffer that training changes); no cut falls between two of its uses."""
    ahead: tuple[Node, ...] = ()
    """Lookups that the leaf does for the root, outside the line. Their rows cross the cuts from the root on."""


def layout(graph: PortableGraph, *, lookups_apart: bool = True) -> Layout:
    """The line, its cuts and the values that cross them.

    Without `lookups_apart`, stages that run one after the other need no stage but the one before: tied parameters cross
    every cut between their uses.
    """
    shared = _shared(graph)
    line = tuple(n for n in graph.nodes if n.name not in shared)
    placed = place_lookups(graph, shared, line) if lookups_apart else PlacedLookups(line, (), None)
    line = placed.line
    place = {n.name: i for i, n in enumerate(line)}
    rows = {n.name: n.output for n in placed.ahead}
    aliases = Aliases(graph)
    parameters = {p.name: ValueSpec(p.name, p.dtype, tuple(p.shape), True) for p in graph.parameters}
    values = {**parameters, **_specs(graph, line, aliases), **rows}
    first_use, last_use = _uses(graph, line, values.keys(), parameters.keys())
    state_uses = _state_uses(graph, line, aliases)
    forbidden = _forbidden(graph, line, place, last_use, aliases, state_uses)
    if graph.loss in place:
        forbidden |= set(range(place[graph.loss] + 1, len(line)))
    if placed.first_use is not None:
        forbidden |= set(range(placed.first_use + 1, len(line)))
    # The rows are there before the first node, at the root.
    made = {**place, **first_use, **dict.fromkeys(rows, 0)}
    begins: dict[int, list[str]] = {}
    ends: dict[int, list[str]] = {}
    for name, last in last_use.items():
        if made[name] < last:
            begins.setdefault(made[name] + 1, []).append(name)
            ends.setdefault(last + 1, []).append(name)
    cuts, crossing = [], {}
    open_now: dict[str, ValueSpec | None] = {}
    for cut in range(1, len(line)):
        open_now.update({name: values[name] for name in begins.get(cut, ())})
        for name in ends.get(cut, ()):
            del open_now[name]
        if cut in forbidden:
            continue
        crosses = [v for v in open_now.values() if v is not None]
        sendable = len(crosses) == len(open_now) and not any(
            v.dtype is not None and v.dtype.is_complex for v in crosses
        )
        if sendable and crosses:
            cuts.append(cut)
            crossing[cut] = tuple(crosses)
    state_use = {s.name: min(state_uses[group]) for s in graph.states if (group := aliases.group(s.name)) in state_uses}
    return Layout(line, shared, tuple(cuts), crossing, first_use, state_use, placed.ahead)


def _uses(
    graph: PortableGraph, line: tuple[Node, ...], values: Collection[str], parameters: Collection[str]
) -> tuple[dict[str, int], dict[str, int]]:
    """The place of the first use of each parameter, and of the last use of each value."""
    first_use: dict[str, int] = {}
    last_use: dict[str, int] = {}
    for i, node in enumerate(line):
        for name in node.references():
            if name in values:
                last_use[name] = i
            if name in parameters:
                first_use.setdefault(name, i)
    # The stage that has the loss also reads the metrics, wherever their values are computed.
    for name in graph.metrics.values():
        if name in values:
            last_use[name] = len(line)
        if name in parameters:
            first_use.setdefault(name, len(line) - 1)
    return first_use, last_use


def _specs(graph: PortableGraph, line: tuple[Node, ...], aliases: Aliases) -> dict[str, ValueSpec | None]:
    """The spec of each value after the last write into it, which is when it can cross a cut. A tensor of zeros needs no
    gradient when it is made, but does after a trained value has been written into it or into a view of it."""
    needing = _needing(graph, line)
    trained = {
        aliases.group(name): place
        for place, node in enumerate(line)
        if node.name in needing
        for name in written_names(node)
    }
    found: dict[str, ValueSpec | None] = {}
    for place, node in enumerate(line):
        value = node.output
        if value is not None and value.dtype is not None and value.dtype.is_floating_point:
            is_filled_later = trained.get(aliases.group(node.name), -1) >= place
            value = replace(value, needs_grad=is_filled_later or node.name in needing)
        found[node.name] = value
    return found


def _needing(graph: PortableGraph, line: tuple[Node, ...]) -> set[str]:
    """Values that gradients flow back from. An operator that returns its argument itself (a write in place,
    `contiguous`) keeps the argument's gradient, even under no_grad."""
    on_line = {node.name for node in line}
    needing = {p.name for p in graph.parameters}
    needing |= {n.name for n in graph.nodes if n.name not in on_line and n.output is not None and n.output.needs_grad}
    for node in line:
        handed_back = not node.grad and needing.intersection(handed_back_names(node))
        if handed_back or (node.output is not None and node.output.needs_grad):
            needing.add(node.name)
    return needing


def _shared(graph: PortableGraph) -> dict[str, Node]:
    aliases = Aliases(graph)
    written = {aliases.group(name) for node in graph.nodes for name in written_names(node)}
    # A frozen weight with more than one dimension belongs to a frozen layer, which is real work, unlike a mask.
    from_batch = {v.name for v in graph.inputs} | {
        c.name for c in graph.constants if not _is_frozen_layer(c.key, c.shape)
    }
    from_batch -= {name for name in from_batch if aliases.group(name) in written}
    shared: dict[str, Node] = {}
    for node in graph.nodes:
        cheap = not ops.is_heavy(node.op) and not draws_random_numbers(node) and aliases.group(node.name) not in written
        gradient = node.output is not None and node.output.needs_grad
        if (
            cheap
            and not gradient
            and not ops.written_arguments(node.op)
            and all(r in from_batch for r in node.references())
        ):
            shared[node.name] = node
            from_batch.add(node.name)
    return shared


def _is_frozen_layer(key: str, shape: tuple[int, ...]) -> bool:
    return not key.startswith("@") and key.endswith(("weight", "bias"))


def _state_uses(graph: PortableGraph, line: tuple[Node, ...], aliases: Aliases) -> dict[str, list[int]]:
    """For every group of names that share a state's memory, the places of the nodes that use one of them."""
    states = {aliases.group(s.name) for s in graph.states}
    uses: dict[str, list[int]] = {}
    for i, node in enumerate(line):
        for name in node.references():
            if aliases.group(name) in states:
                uses.setdefault(aliases.group(name), []).append(i)
    for name in graph.metrics.values():
        if aliases.group(name) in uses:
            uses[aliases.group(name)].append(len(line) - 1)
    return uses


def _function_span(line: tuple[Node, ...], place: dict[str, int], end: int) -> tuple[int, int]:
    """First and last place of a custom function whose backward pass is at `end`. It starts with the first operator of
    its forward, which runs without gradients. A hook on a parameter extends to the parameter's first use, so that the
    stage that uses the parameter owns it."""
    node = line[end]
    outputs = node.references_at(0)
    if not any(name in place and line[place[name]].op != _PICK for name in outputs) and outputs == node.references_at(
        1
    ):
        picks = {n.name for n in line[end + 1 :] if n.op == _PICK and node.name in n.references()}
        used = (i for i, n in enumerate(line) if not picks.isdisjoint(n.references()))
        return end, next(used, end)
    needed, start = set(outputs), end
    while start > 0 and not line[start - 1].grad and line[start - 1].name in needed:
        start -= 1
        needed.update(line[start].references())
    return start, end


def _forbidden(
    graph: PortableGraph,
    line: tuple[Node, ...],
    place: dict[str, int],
    last_use: dict[str, int],
    aliases: Aliases,
    state_uses: dict[str, list[int]],
) -> set[int]:
    """Cuts that would separate a value from an operator that changes it in place, or a list of results from its
    readers."""
    spans: list[tuple[int, int]] = []
    spans += [(i, last_use.get(n.name, i)) for i, n in enumerate(line) if n.output is None]
    members: dict[str, list[int]] = {}
    for name, i in place.items():
        members.setdefault(aliases.group(name), []).append(i)
    states = {aliases.group(s.name) for s in graph.states}
    for i, node in enumerate(line):
        for name in written_names(node):
            group = aliases.group(name)
            if group not in states:
                spans.append((min(members[group]), i))
    spans += [(min(found), max(found)) for found in state_uses.values()]
    spans += [_function_span(line, place, i) for i, node in enumerate(line) if node.backward is not None]
    return {cut for start, end in spans for cut in range(start + 1, end + 1)}

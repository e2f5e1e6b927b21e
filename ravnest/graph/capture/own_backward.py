"""Conversion of the marks of gradient_marks.py to `py.own_gradient` nodes that carry their backward pass.

In the exported list of operators, a backward pass lies between the stand-in for its first incoming gradient and the
mark that names its outgoing gradients. The operators that lead from the one to the other move into the node; values
that they take from outside become saved values. A backward pass that has no such form is a CaptureError.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from ravnest.errors import CaptureError
from ravnest.graph import ops
from ravnest.graph.aliasing import Aliases
from ravnest.graph.portable import Argument, Backward, Node, PortableGraph, Ref, ValueSpec

GRADIENT_OF = "ravnest.gradient_of.default"
OWN_GRADIENT = "ravnest.own_gradient.default"
HOOKED = "ravnest.hooked.default"
MARKS = frozenset({GRADIENT_OF, OWN_GRADIENT, HOOKED})
ENTER = "ravnest.enter.default"


def with_backward_passes(nodes: Sequence[Node], given: Iterable[ValueSpec], calls: Sequence[str]) -> list[Node]:
    """The nodes without marks. CaptureError for a backward pass that has no form.

    `given` are the values that exist before the first node; `calls` describes each backward pass, by its number.
    """
    if not any(n.op in MARKS for n in nodes):
        return list(nodes)
    return _Gathering(nodes, {v.name: v for v in given}, calls).result()


@dataclass
class _Gathering:
    nodes: Sequence[Node]
    given: Mapping[str, ValueSpec]
    calls: Sequence[str]
    place: dict[str, int] = field(default_factory=dict)
    by_name: dict[str, Node] = field(default_factory=dict)
    moved: set[str] = field(default_factory=set)
    """Names of nodes that have moved from the forward into a backward pass."""
    hooked: dict[str, str] = field(default_factory=dict)
    """Stand-ins for values that have a hook, each with its value."""

    def __post_init__(self) -> None:
        self.place = {n.name: i for i, n in enumerate(self.nodes)}
        self.by_name = {n.name: n for n in self.nodes}

    def result(self) -> list[Node]:
        kept: list[Node] = []
        for i in range(len(self.nodes)):
            node = self.nodes[i]
            if node.op == OWN_GRADIENT:
                outputs, inputs, found = (_names(a) for a in node.args[:3])
                kept.append(self._gathered(node, i, outputs, inputs, found))
            elif node.op == HOOKED:
                values, found = (_names(a) for a in node.args[:2])
                # The hook that was registered last gets the gradient last, so it is next to the value itself.
                values = [self.hooked.get(str(v), v) for v in values]
                made = self._gathered(node, i, values, values, found)
                self._place_hook(node, made, kept, values)
            elif node.op == GRADIENT_OF:
                self.moved.add(node.name)
            else:
                kept.append(node)
        return self._next_to_their_users(self._without_moved(kept))

    def _gathered(
        self,
        mark: Node,
        end: int,
        outputs: Sequence[str | None],
        inputs: Sequence[str | None],
        found: Sequence[str | None],
    ) -> Node:
        arriving = [n.name for n in self.nodes[:end] if n.op == GRADIENT_OF and n.args[1] == mark.args[-1]]
        start = min((self.place[g] for g in arriving), default=end)
        region = [n for n in self.nodes[start:end] if n.op not in MARKS]
        tainted = self._tainted(region)
        body = self._body(region, {name for name in found if name}, arriving, tainted, mark)
        made = {n.name for n in body}
        foreign = [n for n in self._references(body, found) if n not in made and n not in arriving]
        for name in foreign:
            if self.by_name.get(name) is not None and self.by_name[name].op == GRADIENT_OF:
                self._refuse(mark, "it needs the gradient of another value than its own")
        # The forward cannot use values that are computed in a backward pass.
        self.moved |= tainted | made | ({n.name for n in region} - self._used_elsewhere(region, mark))
        local = {name: f"g{i}" for i, name in enumerate(arriving)}
        local.update({name: f"s{i}" for i, name in enumerate(foreign)})
        local.update({n.name: f"b{i}" for i, n in enumerate(body)})
        backward = Backward(
            gradients=tuple(local[name] for name in arriving),
            saved=tuple(local[name] for name in foreign),
            nodes=self._own_gradients(tuple(_inside(n, local) for n in body), len(arriving)),
            yields=tuple(None if name is None else local[name] for name in found),
        )
        lists = (outputs, inputs, foreign)
        return Node(
            mark.name, ops.OWN_GRADIENT, tuple(tuple(Ref(str(n)) for n in each) for each in lists), backward=backward
        )

    def _tainted(self, region: Sequence[Node]) -> set[str]:
        """Names of the values that depend on a gradient."""
        tainted = {n.name for n in self.nodes if n.op == GRADIENT_OF}
        for node in region:
            if not tainted.isdisjoint(node.references()):
                tainted.add(node.name)
        return tainted

    def _body(
        self, region: Sequence[Node], wanted: set[str], arriving: Sequence[str], tainted: set[str], mark: Node
    ) -> list[Node]:
        """The nodes that lead to the outgoing gradients, except those that depend on no gradient and are also used
        elsewhere: these remain where they are."""
        aliases = Aliases(PortableGraph(tuple(region)))
        inside = {n.name for n in region}
        shared = self._used_elsewhere(region, mark)
        needed, groups = set(wanted), {aliases.group(name) for name in wanted}
        body: list[Node] = []
        for node in reversed(region):
            written = [name for p in ops.written_arguments(node.op) for name in node.references_at(p)]
            writes = any(aliases.group(name) in groups for name in written)
            if any(self._is_foreign(aliases, name, inside, arriving) for name in written):
                self._refuse(mark, "it changes a value of the model in place")
            if node.name not in needed and not writes:
                continue
            if node.name in shared and node.name not in tainted and not written:
                continue
            if ops.is_random(node.op):
                self._refuse(mark, "it draws random numbers")
            body.append(node)
            needed.update(node.references())
            groups.update(aliases.group(name) for name in node.references())
        return body[::-1]

    def _is_foreign(self, aliases: Aliases, name: str, inside: set[str], arriving: Sequence[str]) -> bool:
        """Whether a value shares memory with a value from outside the backward pass that is not a gradient."""
        members = {n for n in self.by_name if aliases.group(n) == aliases.group(name)} | {name}
        members |= {n for n in self.given if aliases.group(n) == aliases.group(name)}
        return any(n not in inside and n not in arriving for n in members)

    def _used_elsewhere(self, region: Sequence[Node], mark: Node) -> set[str]:
        """Names of the region's values that the forward uses, directly or indirectly."""
        inside = {n.name for n in region}
        used = {
            name
            for node in self.nodes
            if node.name not in inside and node is not mark and node.op not in MARKS
            for name in node.references()
            if name in inside
        }
        for node in reversed(region):
            if node.name in used:
                used.update(name for name in node.references() if name in inside)
        return used

    def _references(self, body: Sequence[Node], found: Sequence[str | None]) -> list[str]:
        names = [name for node in body for name in node.references()] + [name for name in found if name]
        return list(dict.fromkeys(names))

    @staticmethod
    def _own_gradients(body: tuple[Node, ...], arriving: int) -> tuple[Node, ...]:
        """The body with a copy of each gradient that it changes in place, since others may receive that gradient."""
        aliases = Aliases(PortableGraph(body))
        written = {
            aliases.group(name)
            for node in body
            for position in ops.written_arguments(node.op)
            for name in node.references_at(position)
        }
        changed = [f"g{i}" for i in range(arriving) if aliases.group(f"g{i}") in written]
        copies = [Node(f"{name}_copy", "aten.clone.default", (Ref(name),)) for name in changed]
        renamed = {name: f"{name}_copy" for name in changed}
        return (*copies, *(renamed_references(node, renamed) for node in body))

    def _place_hook(self, node: Node, made: Node, kept: list[Node], values: Sequence[str | None]) -> None:
        """Put a hook's node and the picks of its results directly after its values; users of the values then take the
        results."""
        names = [str(v) for v in values]
        there = {name: i for i, name in enumerate(n.name for n in kept)}
        saved = [a.name for a in made.args[2]]  # type: ignore[union-attr]
        place = 1 + max((there.get(name, -1) for name in names), default=-1)
        if any(there.get(name, -1) >= place for name in saved):
            place = len(kept)
        users = [n for n in kept[:place] if not set(names).isdisjoint(n.references()) and _has_gradient(n)]
        early = [n for n in users if n.name not in names]
        if early:
            self._refuse(node, "the tensor was used before the hook was registered")
        picks = {name: self._fresh(f"{made.name}_{i}") for i, name in enumerate(names)}
        self.hooked.update({pick: name for name, pick in picks.items()})
        rest = [renamed_references(n, picks) for n in kept[place:]]
        outputs = [self.by_name[name].output if name in self.by_name else self.given.get(name) for name in names]
        kept[place:] = [
            made,
            *(
                Node(picks[name], "py.getitem", (Ref(made.name), i), output=_named(spec, picks[name]))
                for i, (name, spec) in enumerate(zip(names, outputs, strict=True))
            ),
            *rest,
        ]
        later = {n.name: renamed_references(n, picks) for n in self.nodes[self.place[made.name] + 1 :]}
        self.nodes = [later.get(n.name, n) for n in self.nodes]
        self.by_name = {n.name: n for n in self.nodes}

    def _without_moved(self, kept: list[Node]) -> list[Node]:
        """The nodes that have not moved into backward passes; CaptureError if one of them depends on a node that
        has."""
        left = [n for n in kept if n.name not in self.moved]
        owners = {n.name for n in left if n.op == ops.OWN_GRADIENT}
        # They were traced with gradients off, but their results have gradients.
        left = [replace(n, grad=True) if n.op == "py.getitem" and owners & {*n.references()} else n for n in left]
        for node in left:
            if not self.moved.isdisjoint(node.references()):
                raise CaptureError(
                    f"the forward uses {node.op} on a value that a backward pass or a hook computes only later"
                )
        return left

    def _next_to_their_users(self, nodes: list[Node]) -> list[Node]:
        """The nodes with each hook on a parameter moved to the parameter's use, since the stage that uses a parameter
        owns it."""
        for hook in reversed([n for n in nodes if n.op == ops.OWN_GRADIENT]):
            if not all(self.hooked.get(name, name) in self.given for name in hook.references_at(0)):
                continue
            group = [n for n in nodes if n is hook or (n.op == "py.getitem" and n.args[0] == Ref(hook.name))]
            names = {n.name for n in group}
            rest = [n for n in nodes if n.name not in names]
            first = next((i for i, n in enumerate(rest) if not names.isdisjoint(n.references())), None)
            nodes = rest if first is None else [*rest[:first], *group, *rest[first:]]
        return nodes

    def _fresh(self, name: str) -> str:
        while name in self.by_name or name in self.given or name in self.hooked:
            name += "_"
        return name

    def _refuse(self, mark: Node, reason: str) -> NoReturn:
        raise CaptureError(f"{self.calls[call_of(mark)]} cannot be captured: {reason}")


def call_of(mark: Node) -> int:
    """The number of the call to which a mark belongs."""
    number = mark.args[-1]
    assert isinstance(number, int)
    return number


def renamed_references(node: Node, names: Mapping[str, str]) -> Node:
    """The node with its references renamed."""
    if not names or names.keys().isdisjoint(node.references()):
        return node
    form = node.evaluation
    return replace(
        node,
        args=tuple(_renamed(a, names) for a in node.args),
        kwargs={k: _renamed(a, names) for k, a in node.kwargs.items()},
        evaluation=None
        if form is None
        else replace(
            form,
            args=tuple(_renamed(a, names) for a in form.args),
            kwargs={k: _renamed(a, names) for k, a in form.kwargs.items()},
        ),
    )


def _renamed(argument: Argument, names: Mapping[str, str]) -> Argument:
    if isinstance(argument, Ref):
        return Ref(names.get(argument.name, argument.name))
    return tuple(_renamed(a, names) for a in argument) if isinstance(argument, tuple) else argument


def _inside(node: Node, local: Mapping[str, str]) -> Node:
    node = renamed_references(node, local)
    return replace(node, name=local[node.name], output=None, grad=True)


def _names(argument: Argument) -> list[str | None]:
    assert isinstance(argument, tuple)
    return [a.name if isinstance(a, Ref) else None for a in argument]


def _named(spec: ValueSpec | None, name: str) -> ValueSpec | None:
    return None if spec is None else replace(spec, name=name)


def _has_gradient(node: Node) -> bool:
    """Whether gradients may flow through the node."""
    output = node.output
    return node.grad and (output is None or (output.dtype is not None and output.dtype.is_floating_point))

"""Alignment of training and evaluation, for a model whose evaluation the train/eval switch cannot express.

A model may behave quite differently in eval() and train(): skip paths (stochastic depth), draw noise in evaluation,
clamp its outputs. Such a model is exported a second time, in evaluation mode, and the two lists of operators are
aligned like two texts. A node that occurs in both stays as it is; a node that takes other values in evaluation, or
occurs in one list only, gets an evaluation form. By construction the result runs the first list in training and the
second in evaluation; the alignment only decides how many nodes the two share.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher

import torch

from ravnest.errors import CaptureError
from ravnest.graph import ops
from ravnest.graph.aliasing import Aliases, written_names
from ravnest.graph.capture.lower import Lowered
from ravnest.graph.portable import Argument, EvaluationForm, Node, PortableGraph, Ref, ValueSpec, WeightSpec
from ravnest.graph.switch import evaluation_form

_SAME = "aten.alias.default"
_SIZE = re.compile(r"\b[su]\d+\b")
"""A free size within a size that is computed from it."""


def aligned(trained: Lowered, evaluated: Lowered) -> Lowered:
    """One graph that trains like the first and evaluates like the second; CaptureError if evaluation changes a
    buffer."""
    if evaluated.graph.states:
        key = evaluated.graph.states[0].key
        name = evaluated.graph.states[0].name
        line = next((evaluated.lines.get(n.name, "") for n in evaluated.graph.nodes if name in written_names(n)), "")
        raise CaptureError(
            f"the model changes {key}{line} in eval(), but evaluation in a swarm must not change a model; "
            "change it under `if self.training:` only"
        )
    return _Alignment(trained, evaluated).result()


@dataclass
class _Alignment:
    trained: Lowered
    evaluated: Lowered
    nodes: list[Node] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    """Names of the evaluated graph's values in the new graph."""
    only_trained: set[str] = field(default_factory=set)
    only_evaluated: set[str] = field(default_factory=set)
    added: dict[str, tuple[WeightSpec, torch.Tensor]] = field(default_factory=dict)
    """Constants that are used in evaluation only, by key."""

    def __post_init__(self) -> None:
        train = self.trained.whole
        self.taken = {*train.given_names(), *(n.name for n in train.nodes)}
        self.plain = _without_own_gradients(train)
        self.hidden = _without_own_gradients(self.evaluated.whole)
        self.sizes = _sizes(self.evaluated.whole, train)
        self.aliases = Aliases(train)
        self.states = {self.aliases.group(s.name) for s in self.trained.graph.states}

    def result(self) -> Lowered:
        train, evaluated = self.trained.whole, self.evaluated.whole
        self.names = {v.name: v.name for v in evaluated.inputs}
        self._name_weights()
        second = [n for n in evaluated.nodes if n.op != ops.OWN_GRADIENT and n.name not in self.hidden]
        first = list(train.nodes)
        tokens = [self._token(n, self.trained) for n in first], [self._token(n, self.evaluated) for n in second]
        match = SequenceMatcher(None, *tokens, autojunk=False)
        for kind, i, i_end, j, j_end in match.get_opcodes():
            if kind == "equal":
                for have, want in zip(first[i:i_end], second[j:j_end], strict=True):
                    self._same(have, want)
                continue
            for have in first[i:i_end]:
                self._trained_only(have)
            for want in second[j:j_end]:
                self._evaluated_only(want)
        return self._whole(train, evaluated)

    def _is_state(self, name: str) -> bool:
        return self.aliases.group(name) in self.states

    def _token(self, node: Node, lowered: Lowered) -> tuple[str, str]:
        return node.op, lowered.lines.get(node.name, "")

    def _same(self, have: Node, want: Node) -> None:
        self.names[want.name] = have.name
        wanted = self._call(want)
        usual = evaluation_form(have, self._is_state)
        if self._plainly(usual) != (wanted.op, wanted.args, dict(wanted.kwargs)):
            have = replace(have, evaluation=wanted)
        self.nodes.append(have)

    def _trained_only(self, node: Node) -> None:
        self.only_trained.add(node.name)
        written = written_names(node)
        if written and not any(self._is_state(name) for name in written):
            node = replace(node, evaluation=EvaluationForm(_SAME, (Ref(written[0]),)))
        self.nodes.append(node)

    def _evaluated_only(self, node: Node) -> None:
        name = self.names[node.name] = self._fresh(node.name)
        self.only_evaluated.add(name)
        call = self._call(node)
        output = None if node.output is None else self._spec(node.output, name)
        made = Node(name, call.op, call.args, call.kwargs, node.grad, output=output)
        if written := written_names(made):
            made = replace(made, op=_SAME, args=(Ref(written[0]),), kwargs={}, evaluation=call)
        self.nodes.append(made)

    def _call(self, node: Node) -> EvaluationForm:
        args = tuple(self._there(a) for a in node.args)
        return EvaluationForm(node.op, args, {k: self._there(a) for k, a in node.kwargs.items()})

    def _there(self, argument: Argument) -> Argument:
        """The argument with the names of the new graph."""
        if isinstance(argument, Ref):
            followed = _followed(argument, self.hidden)
            assert isinstance(followed, Ref)
            return Ref(self.names[followed.name])
        return tuple(self._there(a) for a in argument) if isinstance(argument, tuple) else argument

    def _plainly(self, node: Node) -> tuple[str, tuple[Argument, ...], dict[str, Argument]]:
        """The call without the nodes that only matter to gradients."""
        return (
            node.op,
            tuple(_followed(a, self.plain) for a in node.args),
            {k: _followed(a, self.plain) for k, a in node.kwargs.items()},
        )

    def _spec(self, spec: ValueSpec, name: str) -> ValueSpec | None:
        """The spec with the names that its sizes have in the new graph; None if a size has none there."""
        shape: list[int | str] = []
        for size in spec.shape:
            if isinstance(size, str) and not self.sizes.keys() >= set(_SIZE.findall(size)):
                return None
            shape.append(_SIZE.sub(lambda m: self.sizes[m[0]], size) if isinstance(size, str) else size)
        return ValueSpec(name, spec.dtype, tuple(shape))

    def _name_weights(self) -> None:
        """Match weights of the two graphs by their key, and constants made in forward by their value."""
        known = {w.key: w.name for w in self.trained.whole.weights}
        loose = {k: t for k, t in self.trained.weights.items() if k.startswith("@") and k in known}
        for spec in self.evaluated.whole.weights:
            tensor = self.evaluated.weights[spec.key]
            if spec.key.startswith("@"):
                key = next((k for k, t in loose.items() if _equal(t, tensor)), None)
            else:
                key = spec.key if spec.key in known else None
            if key is None:
                name = self._fresh(spec.name)
                key = f"@evaluation.{spec.key.removeprefix('@')}" if spec.key.startswith("@") else spec.key
                self.added[key] = (replace(spec, name=name, key=key), tensor)
                self.names[spec.name] = name
            else:
                self.names[spec.name] = known[key]

    def _whole(self, train: PortableGraph, evaluated: PortableGraph) -> Lowered:
        metrics = {name: self._name(value) for name, value in evaluated.metrics.items()}
        loss = str(train.loss)
        wanted = self._name(str(evaluated.loss))
        if wanted != self.plain.get(loss, loss):
            spec = next(n.output for n in self.nodes if n.name == loss)
            loss = self._fresh("loss")
            output = None if spec is None else ValueSpec(loss, spec.dtype, spec.shape)
            call = EvaluationForm(_SAME, (Ref(wanted),))
            self.nodes.append(Node(loss, _SAME, (Ref(str(train.loss)),), output=output, evaluation=call))
        whole = replace(
            train,
            nodes=tuple(self.nodes),
            constants=(*train.constants, *(spec for spec, _ in self.added.values())),
            loss=loss,
            metrics=metrics,
        )
        weights = {**self.trained.weights, **{key: tensor for key, (_, tensor) in self.added.items()}}
        lines: Mapping[str, str] = _Both(self.trained.lines, self.evaluated.lines)
        return Lowered.of(whole, weights, lines, frozenset(self.only_trained), frozenset(self.only_evaluated))

    def _name(self, value: str) -> str:
        found = self._there(Ref(value))
        assert isinstance(found, Ref)
        return found.name

    def _fresh(self, name: str) -> str:
        fresh, n = f"eval_{name}", 1
        while fresh in self.taken:
            fresh, n = f"eval_{name}_{n}", n + 1
        self.taken.add(fresh)
        return fresh


def _sizes(evaluated: PortableGraph, trained: PortableGraph) -> dict[str, str]:
    """Names of the one graph's free sizes in the other one, found from the inputs, whose shapes agree."""
    there = {v.name: v.shape for v in trained.inputs}
    return {
        size: other
        for value in evaluated.inputs
        for size, other in zip(value.shape, there[value.name], strict=True)
        if isinstance(size, str) and isinstance(other, str)
    }


class _Both(dict[str, str]):
    """Lines of the user's code for the nodes of both graphs."""

    def __init__(self, first: Mapping[str, str], second: Mapping[str, str]) -> None:
        super().__init__()
        self._first, self._second = first, second

    def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
        if name in self._first:
            return self._first[name]
        return self._second.get(name.removeprefix("eval_"), default)


def _without_own_gradients(graph: PortableGraph) -> dict[str, str]:
    """For each value that only adds a backward pass to another one, that other one."""
    owners = {n.name: n for n in graph.nodes if n.op == ops.OWN_GRADIENT}
    plain: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "py.getitem" and isinstance(node.args[0], Ref) and node.args[0].name in owners:
            outputs, index = owners[node.args[0].name].args[0], node.args[1]
            assert isinstance(outputs, tuple) and isinstance(index, int)
            plain[node.name] = outputs[index].name
    return plain


def _followed(argument: Argument, plain: Mapping[str, str]) -> Argument:
    if isinstance(argument, Ref):
        name = argument.name
        while name in plain:
            name = plain[name]
        return Ref(name)
    return tuple(_followed(a, plain) for a in argument) if isinstance(argument, tuple) else argument


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b)))

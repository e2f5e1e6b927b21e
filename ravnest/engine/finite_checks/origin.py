"""Where values that are not finite arose in a stage: in what it was given, in a parameter, or at an operator.

A microbatch's forward is run once more, operator by operator. An infinity may be meant (a mask holds them), so the
search begins at what came out and follows it back: the operator that made NaN of numbers, or the infinity that became
one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from ravnest.graph.portable import Node, PortableGraph, Ref
from ravnest.graph.program import Program

State = Literal["finite", "infinite", "nan", ""]
"""Of several values the worst; empty: not known."""

_DIVERGED: Final = 1e12
"""Values beyond this come of training that has diverged, and not of an operator at the edge of its domain."""
_MAKES_INFINITIES: Final = ("full", "scalar_tensor", "masked_fill", "where", "fill", "full_like", "new_full")
"""Operators that put an infinity where the model says so."""
_STEEP: Final = ("sqrt", "rsqrt", "log", "log2", "log10", "reciprocal", "norm", "linalg_vector_norm", "acos")
_ORDER: Final = {"": 0, "finite": 1, "infinite": 2, "nan": 3}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a stage says of one microbatch."""

    received: State = ""
    sent: State = ""
    kind: Literal["", "data", "parameter", "operator"] = ""
    """What the first value that is not finite came of, where it arose here."""
    where: str = ""
    """That in words, with what to do about it."""


@dataclass(frozen=True, slots=True)
class Testimony:
    """What a stage says where a loss or a gradient is not finite."""

    forward: Finding
    gradients_received: str = ""
    gradients_sent: str = ""
    steep: str = ""
    """Operators of the stage whose gradients may be infinite where their values are not."""


def find(
    graph: PortableGraph,
    program: Program,
    given: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    seed: int,
    microbatch: int,
) -> Finding:
    """Runs the training forward of a microbatch on these values and looks for the first that is not finite."""
    received = worst(given[value.name] for value in graph.receives)
    outputs = [value.name for value in graph.sends] + ([graph.loss] if graph.loss else [])
    states, extremes = _states(program, given, weights, seed, microbatch)
    sent = worst_of(states[name] for name in outputs)
    if _ORDER[sent] <= _ORDER["finite"]:
        return Finding(received, sent)
    for value in graph.inputs:
        if states[value.name] == "nan":
            return Finding(received, sent, "data", f"the input {value.name} holds NaN: {_samples(given[value.name])}")
    keys = {p.name: p.key for p in graph.parameters}
    for name, key in keys.items():
        if _ORDER[states[name]] > _ORDER["finite"]:
            edges = steep(graph)
            also = f", and keep values away from 0 in {edges}, whose gradients are not finite there" if edges else ""
            where = f"the parameter {key} is not finite: lower the learning rate or set pipeline.clip_norm{also}"
            return Finding(received, sent, "parameter", where)
    node, infinite = _origin(graph, states, outputs)
    if infinite:
        where = f"the input {infinite} holds infinities: {_samples(given[infinite])}"
        return Finding(received, sent, "data", where)
    if node is None:
        return Finding(received, sent)
    return Finding(received, sent, "operator", _at(graph, node, keys, extremes))


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether every number is finite, as a number on the tensor's device. In one pass and without memory of its own:
    torch.isfinite takes 17 times as long on a processor."""
    if not tensor.numel() or tensor.is_complex():
        return torch.isfinite(tensor).all()
    least, most = torch.aminmax(tensor)
    # Both are NaN where any number is.
    return torch.isfinite(least) & torch.isfinite(most)


def worst(values: Any) -> State:
    """Of these values the worst state."""
    return worst_of(state_of(value) for value in values)


def worst_of(states: Any) -> State:
    found: State = ""
    for state in states:
        if _ORDER[state] > _ORDER[found]:
            found = state
    return found


def state_of(value: Any) -> State:
    """Whether a value is finite, as far as that is a question."""
    if isinstance(value, list | tuple):
        return worst(value)
    if isinstance(value, float):
        value = torch.tensor(value)
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return "finite"
    if bool(all_finite(value)):
        return "finite"
    return "nan" if bool(torch.isnan(value).any()) else "infinite"


def steep(graph: PortableGraph) -> str:
    """The operators of a stage whose gradients may be infinite where their values are not; empty where it has none."""
    keys = {p.name: p.key for p in graph.parameters}
    found = [f"{_short(node)}{_behind(graph, node, keys)}" for node in graph.nodes if _is_steep(node)]
    return ", ".join(dict.fromkeys(found[:3]))


def _states(
    program: Program, given: Mapping[str, Any], weights: Mapping[str, torch.Tensor], seed: int, microbatch: int
) -> tuple[dict[str, State], dict[str, tuple[float, float]]]:
    """The state of every value, and of every operator the least and the largest number among what it got."""
    states: dict[str, State] = {name: state_of(value) for name, value in (*given.items(), *weights.items())}
    extremes: dict[str, tuple[float, float]] = {}

    def before(node: Node, arguments: Sequence[Any]) -> None:
        extremes[node.name] = _extremes(arguments)

    def after(node: Node, result: Any) -> None:
        states[node.name] = state_of(result)

    copies = {name: v.detach().clone() if isinstance(v, torch.Tensor) else v for name, v in given.items()}
    own = {name: weight.detach() for name, weight in weights.items()}
    with torch.no_grad():
        program.watch(copies, own, seed=seed, microbatch=microbatch, before=before, after=after)
    return states, extremes


def _origin(graph: PortableGraph, states: Mapping[str, State], outputs: Sequence[str]) -> tuple[Node | None, str]:
    """The first operator, of those that the outputs come of, that made NaN; where it did so of an infinity, the one
    that made that, or the input that held it. Neither where what arrived is to blame."""
    needed = set(outputs)
    ancestors: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in needed:
            ancestors.append(node)
            needed.update(node.references())
    ancestors.reverse()
    wanted: State = worst_of(states[name] for name in outputs)
    first = next((n for n in ancestors if states.get(n.name) == wanted and not _has(n, states, wanted)), None)
    if first is None:
        return None, ""
    of_infinities = set(first.references()) if _has(first, states, "infinite") else set()
    infinite: Node | None = None
    for node in reversed(ancestors[: ancestors.index(first)]):
        if node.name in of_infinities and states.get(node.name) == "infinite":
            if not _has(node, states, "infinite") and _short(node) not in _MAKES_INFINITIES:
                infinite = node
            of_infinities.update(node.references())
    inputs = [value.name for value in graph.inputs if states[value.name] == "infinite" and value.name in of_infinities]
    if infinite is None and inputs:
        return None, inputs[0]
    if wanted == "infinite" and _short(first) in _MAKES_INFINITIES:
        return None, ""
    return infinite or first, ""


def _has(node: Node, states: Mapping[str, State], state: State) -> bool:
    return any(states.get(name) == state for name in node.references())


def _at(graph: PortableGraph, node: Node, keys: Mapping[str, str], extremes: Mapping[str, tuple[float, float]]) -> str:
    least, largest = extremes.get(node.name, (0.0, 0.0))
    what = f"the operator {_short(node)}{_behind(graph, node, keys)} yields values that are not finite"
    of = f"of numbers between {least:.4g} and {largest:.4g}"
    if max(abs(least), abs(largest)) > _DIVERGED:
        return f"{what}, {of}: training has diverged; lower the learning rate or set pipeline.clip_norm"
    return f"{what}, {of}: keep what goes into it away from where it has no value, for one with clamp"


def _behind(graph: PortableGraph, node: Node, keys: Mapping[str, str]) -> str:
    """Like " (behind layers.2.weight)": the parameter that was used last before the operator, or first after it."""
    place = graph.nodes.index(node)
    used = [next((keys[name] for name in other.references() if name in keys), "") for other in graph.nodes]
    last = next((key for key in reversed(used[: place + 1]) if key), "")
    following = next((key for key in used[place + 1 :] if key), "")
    if last:
        return f" (behind {last})"
    return f" (before {following})" if following else ""


def _is_steep(node: Node) -> bool:
    """Whether the gradient of an operator may be infinite where its value is not: not where it divides by a plain
    number, nor where it takes a power of 1 or more."""
    second = node.args[1] if len(node.args) > 1 else None
    if _short(node) == "div":
        return isinstance(second, Ref)
    if _short(node) == "pow":
        return not (isinstance(second, int | float) and (second >= 1 or second == 0))
    return _short(node) in _STEEP


def _short(node: Node) -> str:
    return node.op.split(".")[1] if node.op.count(".") else node.op


def _extremes(arguments: Sequence[Any]) -> tuple[float, float]:
    least, largest = float("inf"), float("-inf")
    for argument in arguments:
        for value in argument if isinstance(argument, list | tuple) else [argument]:
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
                finite = value[torch.isfinite(value)]
                if finite.numel():
                    least, largest = min(least, float(finite.min())), max(largest, float(finite.max()))
    return (least, largest) if least <= largest else (0.0, 0.0)


def _samples(value: torch.Tensor) -> str:
    """Which samples of the batch are meant."""
    if not value.dim():
        return "clean the data"
    bad = (~torch.isfinite(value)).reshape(value.shape[0], -1).any(dim=1).nonzero().flatten().tolist()
    shown = ", ".join(str(number) for number in bad[:5]) + (", …" if len(bad) > 5 else "")
    return f"clean sample {shown} of that batch (counted from 0)"

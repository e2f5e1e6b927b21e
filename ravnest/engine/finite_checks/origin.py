"""Search for the origin of values that are not finite in a stage: received data, a parameter, or an operator.

The search runs the forward of the microbatch once more, operator by operator. An infinity may be intended, as in a
mask, so the search starts from the outputs and goes back: to the operator that computed NaN from numbers, or to the
infinity that NaN was computed from.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from ravnest.graph.portable import Node, PortableGraph, Ref
from ravnest.graph.program import Program

State = Literal["finite", "infinite", "nan", ""]
"""The state of a value, or the worst state of several values; empty if unknown."""

_DIVERGED: Final = 1e12
"""Larger values are a sign that training has diverged, not of an operator at the edge of its domain."""
_MAKES_INFINITIES: Final = ("full", "scalar_tensor", "masked_fill", "where", "fill", "full_like", "new_full")
"""Operators whose infinities are intended by the model."""
_STEEP: Final = ("sqrt", "rsqrt", "log", "log2", "log10", "reciprocal", "norm", "linalg_vector_norm", "acos")
_ORDER: Final = {"": 0, "finite": 1, "infinite": 2, "nan": 3}


@dataclass(frozen=True, slots=True)
class ForwardDiagnosis:
    """Result of the search in the forward of one microbatch."""

    received: State = ""
    """The state of the activations from the stage before."""
    sent: State = ""
    """The state of the outputs."""
    kind: Literal["", "data", "parameter", "operator"] = ""
    """The kind of the origin; empty if the origin is not in this stage."""
    where: str = ""
    """The origin in words, with advice on how to fix it."""


@dataclass(frozen=True, slots=True)
class StageDiagnosis:
    """Report of a stage about a microbatch whose loss or gradients are not finite."""

    forward: ForwardDiagnosis
    gradients_received: State = ""
    gradients_sent: State = ""
    steep: str = ""
    """Operators of the stage whose gradients may be infinite although their values are finite."""


def diagnose_forward(
    graph: PortableGraph,
    program: Program,
    given: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    seed: int,
    microbatch: int,
) -> ForwardDiagnosis:
    """Runs the training forward of a microbatch on these values and searches for the origin of those not finite."""
    received = state_of([given[value.name] for value in graph.from_stages])
    outputs = [value.name for value in graph.sends] + ([graph.loss] if graph.loss else [])
    states, extremes = _states(program, given, weights, seed, microbatch)
    sent = worst_of(states[name] for name in outputs)
    if _ORDER[sent] <= _ORDER["finite"]:
        return ForwardDiagnosis(received, sent)
    for value in graph.inputs:
        if states[value.name] == "nan":
            return ForwardDiagnosis(
                received, sent, "data", f"the input {value.name} holds NaN: {_samples(given[value.name])}"
            )
    keys = {p.name: p.key for p in graph.parameters}
    for name, key in keys.items():
        if _ORDER[states[name]] > _ORDER["finite"]:
            edges = steep(graph)
            also = f", and keep values away from 0 in {edges}, whose gradients are not finite there" if edges else ""
            where = f"the parameter {key} is not finite: lower the learning rate or set pipeline.clip_norm{also}"
            return ForwardDiagnosis(received, sent, "parameter", where)
    node, infinite = _origin(graph, states, outputs)
    if infinite:
        where = f"the input {infinite} holds infinities: {_samples(given[infinite])}"
        return ForwardDiagnosis(received, sent, "data", where)
    if node is None:
        return ForwardDiagnosis(received, sent)
    return ForwardDiagnosis(received, sent, "operator", _at(graph, node, keys, extremes))


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether every element is finite, as a scalar tensor on the same device.

    One pass without a temporary tensor: torch.isfinite takes 17 times as long on a CPU.
    """
    if not tensor.numel() or tensor.is_complex():
        return torch.isfinite(tensor).all()
    smallest, largest = torch.aminmax(tensor)
    # Both are NaN if any element is.
    return torch.isfinite(smallest) & torch.isfinite(largest)


def worst_of(states: Iterable[State]) -> State:
    return max(states, key=_ORDER.__getitem__, default="")


def state_of(value: Any) -> State:
    """The state of a value; values that are neither floating-point nor complex are finite."""
    if isinstance(value, list | tuple):
        return worst_of(state_of(each) for each in value)
    if isinstance(value, float):
        value = torch.tensor(value)
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return "finite"
    if bool(all_finite(value)):
        return "finite"
    return "nan" if bool(torch.isnan(value).any()) else "infinite"


def steep(graph: PortableGraph) -> str:
    """The operators of a stage whose gradients may be infinite although their values are finite; empty for none."""
    keys = {p.name: p.key for p in graph.parameters}
    found = [f"{_short(node)}{_behind(graph, node, keys)}" for node in graph.nodes if _is_steep(node)]
    return ", ".join(dict.fromkeys(found[:3]))


def _states(
    program: Program, given: Mapping[str, Any], weights: Mapping[str, torch.Tensor], seed: int, microbatch: int
) -> tuple[dict[str, State], dict[str, tuple[float, float]]]:
    """The state of every value, and the smallest and the largest argument of every operator."""
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
    """The first operator that computed NaN, among those that the outputs depend on.

    If it computed NaN from an infinity: the operator that computed the infinity, or the name of the input that held it.
    Neither if the activations that arrived held the value.
    """
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
    from_infinities = set(first.references()) if _has(first, states, "infinite") else set()
    infinite: Node | None = None
    for node in reversed(ancestors[: ancestors.index(first)]):
        if node.name in from_infinities and states.get(node.name) == "infinite":
            if not _has(node, states, "infinite") and _short(node) not in _MAKES_INFINITIES:
                infinite = node
            from_infinities.update(node.references())
    inputs = [
        value.name for value in graph.inputs if states[value.name] == "infinite" and value.name in from_infinities
    ]
    if infinite is None and inputs:
        return None, inputs[0]
    if wanted == "infinite" and _short(first) in _MAKES_INFINITIES:
        return None, ""
    return infinite or first, ""


def _has(node: Node, states: Mapping[str, State], state: State) -> bool:
    return any(states.get(name) == state for name in node.references())


def _at(graph: PortableGraph, node: Node, keys: Mapping[str, str], extremes: Mapping[str, tuple[float, float]]) -> str:
    smallest, largest = extremes.get(node.name, (0.0, 0.0))
    found = f"the operator {_short(node)}{_behind(graph, node, keys)} yields values that are not finite"
    found += f" from numbers between {smallest:.4g} and {largest:.4g}"
    if max(abs(smallest), abs(largest)) > _DIVERGED:
        return f"{found}: training has diverged; lower the learning rate or set pipeline.clip_norm"
    return f"{found}: keep its inputs inside its domain, for example with clamp"


def _behind(graph: PortableGraph, node: Node, keys: Mapping[str, str]) -> str:
    """Such as " (behind layers.2.weight)": the last parameter used before the operator, or the first one after it."""
    place = graph.nodes.index(node)
    used = [next((keys[name] for name in other.references() if name in keys), "") for other in graph.nodes]
    last = next((key for key in reversed(used[: place + 1]) if key), "")
    following = next((key for key in used[place + 1 :] if key), "")
    if last:
        return f" (behind {last})"
    return f" (before {following})" if following else ""


def _is_steep(node: Node) -> bool:
    """Whether the gradient of an operator may be infinite although its value is finite.

    It cannot be for a division by a plain number or a power with an exponent of 0 or at least 1.
    """
    second = node.args[1] if len(node.args) > 1 else None
    if _short(node) == "div":
        return isinstance(second, Ref)
    if _short(node) == "pow":
        return not (isinstance(second, int | float) and (second >= 1 or second == 0))
    return _short(node) in _STEEP


def _short(node: Node) -> str:
    return node.op.split(".")[1] if node.op.count(".") else node.op


def _extremes(arguments: Sequence[Any]) -> tuple[float, float]:
    smallest, largest = float("inf"), float("-inf")
    for argument in arguments:
        for value in argument if isinstance(argument, list | tuple) else [argument]:
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
                finite = value[torch.isfinite(value)]
                if finite.numel():
                    smallest, largest = min(smallest, float(finite.min())), max(largest, float(finite.max()))
    return (smallest, largest) if smallest <= largest else (0.0, 0.0)


def _samples(value: torch.Tensor) -> str:
    """Advice that names the samples of the batch that are not finite."""
    if not value.dim():
        return "clean the data"
    bad = (~torch.isfinite(value)).reshape(value.shape[0], -1).any(dim=1).nonzero().flatten().tolist()
    shown = ", ".join(str(number) for number in bad[:5]) + (", …" if len(bad) > 5 else "")
    return f"clean sample {shown} of that batch (counted from 0)"

"""Every cut of a graph against the graph in one piece, and that against plain PyTorch."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ravnest.graph import ops
from ravnest.graph.cutting.layout import layout
from ravnest.graph.portable import Argument, Device, PortableGraph, Ref
from ravnest.graph.program import draw_seed
from tests.cuts.pipeline import Batch, Outcome, outcome

MAX_STAGES: Final = 4
TOLERANCE: Final = 1e-9
"""Relative, of float64."""

MODES: Final[tuple[Mapping[str, Any], ...]] = (
    {},
    {"split_backward": True},
    {"versions": "recompute"},
    {"in_flight": 2},
    {"in_flight": 2, "versions": "recompute", "split_backward": True},
)
"""How a stage may train, apart from how it is cut. With two in flight both belong to one update."""


@dataclass(frozen=True)
class Checked:
    """Extent of a comparison."""

    places: int
    """Number of places where the graph can be cut."""
    cuts: int
    """Number of ways to cut it into 2 to 4 stages that were run."""


def check_every_cut(
    graph: PortableGraph, weights: Mapping[str, torch.Tensor], batches: Sequence[Batch], *, every_mode: bool = False
) -> Checked:
    """AssertionError names the first cut that changes a loss, a metric, a gradient or a state, or that hangs. Each cut
    is run in one of the modes, or in every one."""
    whole = {at_once: outcome(graph, weights, batches, in_flight=at_once) for at_once in (1, 2)}
    plain = plainly(graph, weights, batches)
    _compare(whole[1], plain, "in one piece, against plain PyTorch")
    cuts = list(ways(layout(graph).cuts))
    for number, places in enumerate(cuts):
        for mode in MODES if every_mode else (MODES[number % len(MODES)],):
            where = f"cut at {list(places)} with {dict(mode)}"
            try:
                found = outcome(graph, weights, batches, places, **mode)
            except Exception as error:
                raise AssertionError(f"{where}: {error}") from error
            _compare(found, whole[mode.get("in_flight", 1)], where)
    return Checked(len(layout(graph).cuts), len(cuts))


def ways(places: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to cut into 2, 3 and 4 stages."""
    return itertools.chain.from_iterable(itertools.combinations(places, n) for n in range(1, MAX_STAGES))


def plainly(graph: PortableGraph, weights: Mapping[str, torch.Tensor], batches: Sequence[Batch]) -> Outcome:
    """The result of a plain loop: each operator called in turn, then autograd, then a step along the gradients."""
    named = {w.name: weights[w.key].clone() for w in graph.weights}
    losses = []
    for number, batch in enumerate(batches):
        leaves = {p.name: named[p.name].requires_grad_() for p in graph.parameters}
        env = _run(graph, {**batch, **named}, number)
        loss = env[str(graph.loss)]
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        losses.append(loss.item())
        for name, gradient in zip(leaves, gradients, strict=True):
            named[name] = leaves[name].detach() - (0 if gradient is None else gradient)
    state = {f"param:{p.key}": named[p.name] for p in graph.parameters}
    return Outcome(tuple(losses), (), state | {f"buffer:{s.key}": named[s.name] for s in graph.states})


def _run(graph: PortableGraph, env: dict[str, Any], microbatch: int) -> dict[str, Any]:
    for node in graph.nodes:
        if node.seed is not None:
            torch.manual_seed(draw_seed(0, microbatch, node.seed))
        with torch.set_grad_enabled(node.grad):
            args, kwargs = _filled(node.args, env), {k: _filled(a, env) for k, a in node.kwargs.items()}
            env[node.name] = ops.resolve(node.op)(*args, **kwargs)
    return env


def _filled(argument: Argument, env: Mapping[str, Any]) -> Any:
    if isinstance(argument, Ref):
        return env[argument.name]
    if isinstance(argument, Device):
        return torch.device("cpu")
    return [_filled(a, env) for a in argument] if isinstance(argument, tuple) else argument


def _compare(have: Outcome, want: Outcome, where: str) -> None:
    _same(f"the losses {where}", torch.tensor(have.losses), torch.tensor(want.losses))
    for mine, theirs in zip(have.scores, want.scores, strict=False):
        assert mine.keys() == theirs.keys(), where
        for name, score in theirs.items():
            _same(f"{name} {where}", torch.tensor(mine[name]), torch.tensor(score))
    assert have.state.keys() == want.state.keys(), where
    for key, tensor in want.state.items():
        _same(f"{key} {where}", have.state[key], tensor)


def _same(what: str, have: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE if want.dtype is torch.float64 else 1e-5
    try:
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None

"""Check of a capture against the model itself: the graph must train in the same way as the model.

The model runs one training forward and backward on the first batch, and one evaluation. The graph does the same with
the same random numbers. Loss, metrics, the gradient of every parameter and the new value of every buffer must agree. To
save memory, only fingerprints of the model's gradients are kept, and each gradient of the graph is dropped after its
comparison. A difference is a CaptureError that names the parameter or buffer and the line that uses it.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from ravnest.errors import CaptureError, JobError
from ravnest.graph.capture.fingerprint import Fingerprint
from ravnest.graph.capture.lower import Lowered, live
from ravnest.graph.capture.users_line import line_of_error
from ravnest.graph.portable import PortableGraph, ValueSpec
from ravnest.graph.program import Program
from ravnest.graph.switch import draws_random_numbers, evaluation_form

_TOLERANCES: Final = {
    torch.float64: (1e-6, 1e-10),
    torch.float32: (1e-3, 1e-6),
    torch.float16: (2e-2, 1e-4),
    torch.bfloat16: (5e-2, 1e-3),
}
"""Tolerances of a gradient: relative to its own norm, and to the largest gradient norm in the model. The second is for
gradients that consist of rounding errors alone, such as that of a bias before a batch norm. Both runs execute the same
operators, so they nearly always agree to the last digit."""

Call = Callable[..., tuple[torch.Tensor, ...]]
"""A module's forward: from the tensors of a batch to the loss, and the metrics if requested."""


@dataclass(slots=True)
class OwnTraining:
    """Results of one training step of the model itself."""

    loss: torch.Tensor
    gradients: dict[int, Fingerprint]
    """By the id of the parameter. A parameter without a gradient has no entry."""
    buffers: dict[str, torch.Tensor]
    """New value of every buffer."""


def own_evaluation(whole: nn.Module, sample: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Loss and metrics of the model itself, in its current modes. The model is not changed."""
    with _on_the_first_batch(), pinned(whole), torch.no_grad():
        results = torch.func.functional_call(whole, _lent_buffers(whole), _lent(sample))
    return tuple(results)


def own_training(whole: nn.Module, sample: Mapping[str, torch.Tensor]) -> OwnTraining:
    """One training step of the model itself, in its current modes. The model and its gradients are not changed."""
    buffers = _lent_buffers(whole)
    found: dict[int, Fingerprint] = {}
    trained = [p for p in whole.parameters() if p.requires_grad]

    def take(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        found[id(parameter)] = Fingerprint.of(parameter.grad)
        parameter.grad = None

    with _on_the_first_batch("in training mode "), _gradients_put_aside(trained), pinned(whole):
        hooks = [_after_gradient(p, take) for p in trained]
        try:
            with torch.enable_grad():
                loss = torch.func.functional_call(whole, buffers, _lent(sample))[0]
                if loss.requires_grad and trained:
                    # Not torch.autograd.grad for these parameters: activation checkpointing does not support it.
                    torch.autograd.backward(loss)
        finally:
            for hook in hooks:
                hook.remove()
    return OwnTraining(loss.detach(), found, buffers)


def with_gradients(
    lowered: Lowered,
    whole: nn.Module,
    sample: Mapping[str, torch.Tensor],
    own: OwnTraining,
) -> PortableGraph:
    """The graph with `needs_grad` of every value, as observed in one training step; CaptureError if that step differs
    from the model's own."""
    graph, weights = lowered.graph, lowered.weights
    program = Program(_with_unused_draws(lowered))
    leaves = {p.name: weights[p.key].detach().requires_grad_() for p in graph.parameters}
    others = {w.name: weights[w.key].detach().clone() for w in (*graph.constants, *graph.states)}
    check = _Check(lowered, own, whole)
    with pinned(whole), torch.enable_grad():
        env = program.environment(_named(sample), {**leaves, **others})
        needs = _run(program, env)
        if graph.loss is None or not needs.get(graph.loss, False):
            raise JobError(
                "the loss depends on no trainable parameter; check requires_grad and detach() in model and loss"
            )
        loss = env[program.slot(graph.loss)]
        del env
        check.loss(loss.detach())
        for parameter in graph.parameters:
            _after_gradient(leaves[parameter.name], check.taking(parameter.key))
        torch.autograd.backward(loss, inputs=list(leaves.values()))
    check.gradients()
    check.buffers({s.key: others[s.name] for s in graph.states})
    nodes = tuple(
        replace(n, output=None if n.output is None else replace(n.output, needs_grad=needs.get(n.name, False)))
        for n in graph.nodes
    )
    return replace(graph, nodes=nodes)


def evaluation_difference(
    lowered: Lowered,
    whole: nn.Module,
    sample: Mapping[str, torch.Tensor],
    expected: Sequence[torch.Tensor],
) -> str:
    """The difference between the graph's evaluation and the model's own, in words; empty if there is none."""
    graph = lowered.graph
    program = Program(_with_unused_draws(lowered, evaluated=True))
    weights = {w.name: lowered.weights[w.key].detach() for w in program.graph.weights}
    with pinned(whole), torch.no_grad():
        env = program.environment(_named(sample), weights)
        for step in program.evaluation_steps:
            step.call(env)
            for slot in step.frees:
                env[slot] = None
    names = {"loss": str(graph.loss), **graph.metrics}
    for (name, value), want in zip(names.items(), expected, strict=True):
        have = env[program.slot(value)]
        if not torch.allclose(have.double(), want.double(), rtol=1e-3, atol=1e-5, equal_nan=True):
            return f"the captured {name} is {have.item():.6g}, but the model's own is {want.item():.6g}"
    return ""


@contextmanager
def pinned(module: nn.Module) -> Iterator[None]:
    """Fix the random numbers, so that each such block draws the same ones. CaptureError if the block draws from Python
    or NumPy: a graph has torch's random numbers alone."""
    devices = sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            yield
        drawn = "random" if random.getstate() != python else ""
        if not all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy, strict=True)):
            drawn = "numpy.random"
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
    if drawn:
        raise CaptureError(
            f"the forward draws random numbers from {drawn}: a graph would repeat the same number for ever; draw with "
            "torch.rand, and choose with torch.where"
        )


class _Check:
    """Compares one training step of a graph with the model's own."""

    def __init__(self, lowered: Lowered, own: OwnTraining, whole: nn.Module) -> None:
        self._lowered = lowered
        self._own = own
        self._ids = {key: id(tensor) for key, tensor in lowered.weights.items()}
        self._names = {id(p): name.removeprefix("model.") for name, p in whole.named_parameters()}
        # Metrics and their buffers are not part of training.
        self._buffers = {name: buffer for name, buffer in whole.named_buffers() if name in own.buffers}
        self._relative, floor = max(_TOLERANCES.get(d, (0.0, 0.0)) for d in _dtypes(lowered.graph))
        norms = [f.norm for f in own.gradients.values() if f.is_finite]
        self._floor = floor * max(norms, default=0.0)
        self._left = dict(own.gradients)
        self._wrong: dict[str, str] = {}

    def loss(self, loss: torch.Tensor) -> None:
        want = self._own.loss
        if not torch.allclose(loss.double(), want.double(), rtol=self._relative, atol=1e-5, equal_nan=True):
            raise CaptureError(
                f"in training the captured loss is {loss.item():.6g}, but the model's own is {want.item():.6g}, with "
                "the same random numbers: the forward depends on more than its inputs, weights and buffers"
            )

    def taking(self, key: str) -> Callable[[torch.Tensor], None]:
        """A hook that compares the current gradient of a parameter and drops it."""

        def take(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            have, want = Fingerprint.of(leaf.grad), self._left.pop(self._ids[key], None)
            leaf.grad = None
            if want is None:
                if have.norm > self._floor:
                    self._wrong[key] = f"has the norm {have.norm:.3g}, but the model's own parameter gets none"
            elif have.is_finite != want.is_finite:
                self._wrong[key] = "is finite and the model's own is not, or the other way round"
            elif have.is_finite and have.distance(want) > self._relative * want.norm + self._floor:
                self._wrong[key] = (
                    f"has the norm {have.norm:.3g} and the model's own {want.norm:.3g}, and they differ by "
                    f"{have.distance(want):.3g}"
                )

        return take

    def gradients(self) -> None:
        """CaptureError if any gradient differed."""
        for parameter, want in self._left.items():
            if want.norm > self._floor:
                key = next((k for k, i in self._ids.items() if i == parameter), self._names[parameter])
                self._wrong[key] = f"is missing, but the model's own has the norm {want.norm:.3g}"
        if not self._wrong:
            return
        # The error names the wrong gradient nearest to the loss, since the cause lies between it and the loss.
        place = self._uses()
        key = max(self._wrong, key=lambda k: place.get(k, (-1, ""))[0])
        others = f" (and {len(self._wrong) - 1} more)" if len(self._wrong) > 1 else ""
        raise CaptureError(
            f"the gradient of {key}{place.get(key, (0, ''))[1]}{others} in the captured graph {self._wrong[key]}: "
            "between there and the loss, gradients are changed in a way that capture cannot trace, such as a hook on "
            "grad_fn, saved_tensors_hooks or a checkpoint whose inputs need no gradient; use an autograd.Function"
        )

    def buffers(self, states: Mapping[str, torch.Tensor]) -> None:
        """CaptureError if a buffer has another new value than in the model."""
        by_id = {self._ids[key]: value for key, value in states.items()}
        for name, before in self._buffers.items():
            have, want = by_id.get(id(before), before), self._own.buffers[name]
            if not _same(have, want, self._relative):
                key = name.removeprefix("model.")
                line = self._uses().get(key, (0, ""))[1]
                raise CaptureError(
                    f"in training the buffer {key}{line} gets another value in the captured graph than in the model; "
                    "change it in place, in forward and with torch operators alone"
                )

    def _uses(self) -> dict[str, tuple[int, str]]:
        """For each weight by key, the last node that uses it: its place and its line."""
        keys = {w.name: w.key for w in self._lowered.whole.weights}
        found = {}
        for place, node in enumerate(self._lowered.whole.nodes):
            for name in node.references():
                if name in keys:
                    found[keys[name]] = (place, self._lowered.lines.get(node.name, ""))
        return found


def _after_gradient(leaf: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Call the hook when the gradient of a leaf has been computed; returns a handle."""
    return leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _run(program: Program, env: list[Any]) -> dict[str, bool]:
    """Run a training forward that draws its random numbers in the model's order. Returns whether each value has a
    gradient."""
    needs: dict[str, bool] = {}
    for step in program.train_steps:
        step.call(env)
        result = env[program.slot(step.node.name)]
        # A view taken under no_grad reports requires_grad, but has no gradient.
        needs[step.node.name] = step.node.grad and isinstance(result, torch.Tensor) and result.requires_grad
        for slot in step.frees:
            env[slot] = None
    return needs


def _with_unused_draws(lowered: Lowered, evaluated: bool = False) -> PortableGraph:
    """The graph with the random operators whose results are not used: without them, all later ones would draw other
    numbers than in the model."""
    graph, program = lowered.graph, Program(lowered.graph)
    steps = program.evaluation_steps if evaluated else program.train_steps
    used = {step.node.name for step in steps} | (lowered.training_only if evaluated else lowered.evaluation_only)
    forms = [(n, evaluation_form(n) if evaluated else n) for n in lowered.whole.nodes]
    draws = [n for n, form in forms if draws_random_numbers(form) and n.name not in used]
    if not draws:
        return graph
    found = live(lowered.whole, [n.name for n in draws])
    here = {n.name: n for n in graph.nodes}
    known = {w.name for w in graph.weights}
    return replace(
        graph,
        nodes=tuple(here.get(n.name, n) for n in found.nodes),
        sends=tuple(ValueSpec(n.name, None) for n in draws),
        constants=(*graph.constants, *(w for w in found.weights if w.name not in known)),
    )


@contextmanager
def _on_the_first_batch(how: str = "") -> Iterator[None]:
    try:
        yield
    except (CaptureError, JobError):
        raise
    except Exception as error:
        raise CaptureError(
            f"the model fails {how}on the first batch of train_data: {type(error).__name__}: {error}"
            f"{line_of_error(error)}; run model and loss on one batch by hand to see it"
        ) from error


@contextmanager
def _gradients_put_aside(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    kept = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad


def _lent_buffers(whole: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in whole.named_buffers()}


def _lent(sample: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.clone() for tensor in sample.values())


def _named(sample: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in sample.items()}


def _dtypes(graph: PortableGraph) -> list[torch.dtype]:
    specs = [p.dtype for p in graph.parameters] + [n.output.dtype for n in graph.nodes if n.output is not None]
    return [d for d in specs if d in _TOLERANCES] or [torch.float32]


def _same(have: torch.Tensor, want: torch.Tensor, relative: float) -> bool:
    if have.shape != want.shape or not (want.is_floating_point() or want.is_complex()):
        return torch.equal(have, want)
    a, b = Fingerprint.of(have), Fingerprint.of(want)
    return a.is_finite == b.is_finite and a.distance(b) <= relative * b.norm + 1e-6

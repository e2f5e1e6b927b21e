"""Turns a model, its loss and its metrics into one portable graph, without changing the model.

The requester's Python runs here and nowhere else. The graph is exported in training mode with a free batch size;
before it is handed on, it is run on the first batch in evaluation and compared with the model itself, so a model whose
evaluation differs from its training by more than the switch can express is refused here and not found out after a day
of training.
"""

import contextlib
import io
import itertools
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ravnest.errors import CaptureError, JobError
from ravnest.graph.batch import Structure
from ravnest.graph.lower import lower
from ravnest.graph.portable import PortableGraph
from ravnest.graph.program import Program


@dataclass(frozen=True, slots=True)
class Captured:
    """A model as data, with everything needed to give it back under its own names."""

    graph: PortableGraph
    weights: Mapping[str, torch.Tensor]
    """Initial value of every parameter, constant and state, by key. The model's own memory: copy before changing."""
    structure: Structure
    sample: Mapping[str, torch.Tensor]
    """The first batch, by input name."""
    aliases: Mapping[str, str]
    """Names in the model's state_dict that are another entry's tensor (tied weights) -> that entry's key."""
    static: Mapping[str, torch.Tensor]
    """Entries of the state_dict that the graph never uses; they are handed back as they were."""
    not_saved: frozenset[str]
    """Keys of weights that are not in the state_dict (non-persistent buffers, constants inside forward)."""


def capture(
    model: nn.Module, loss: Callable[..., Any], metrics: Mapping[str, Callable[..., Any]], batches: Sequence[Any]
) -> Captured:
    """The portable graph of model, loss and metrics, captured on `batches` (one or two; sizes that differ stay free).

    CaptureError names the line of the user's code that cannot be captured; JobError what is wrong with the data.
    """
    _refuse_shared_memory(model)
    structure = Structure.of(batches[0])
    flat = [structure.flatten(batch) for batch in batches]
    sample = {name: tensor.clone() for name, tensor in flat[0].items()}
    whole = _Whole(model, loss, metrics, structure)
    with _modes_kept(model, loss, *metrics.values()):
        expected = _evaluate(whole, sample, metrics)
        whole.train()
        exported = _export(whole, _at_least_two(sample), _free_sizes(flat))
    graph, tensors = lower(exported, tuple(sample), ("loss", *metrics), trained=_trained_names(model))
    keys, aliases = _state_names(model, tensors)
    weights = {key: tensor.detach() for key, tensor in tensors.items()}
    graph = _with_gradients(graph, weights, sample)
    _compare(graph, weights, sample, expected, metrics)
    used = {w.key for w in graph.weights}
    return Captured(
        graph=graph,
        weights={w.key: weights[w.key] for w in graph.weights},
        structure=structure,
        sample=sample,
        aliases={name: owner for name, owner in aliases.items() if owner in used},
        static={name: tensor.detach() for name, tensor in keys.items() if aliases.get(name, name) not in used},
        not_saved=frozenset(used - set(keys)),
    )


class _Whole(nn.Module):
    """Model, loss and metrics as one module: forward(*tensors of a batch) -> (loss, *metrics)."""

    def __init__(self, model: nn.Module, loss: Any, metrics: Mapping[str, Any], structure: Structure) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.metrics = nn.ModuleDict({k: m for k, m in metrics.items() if isinstance(m, nn.Module)})
        self._plain_metrics = {k: m for k, m in metrics.items() if not isinstance(m, nn.Module)}
        self._order = tuple(metrics)
        self._structure = structure

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        inputs, targets = self._structure.unflatten(tensors)
        outputs = self._structure.call(self.model, inputs)
        loss = self.loss(outputs, targets)
        scores = [
            (self.metrics[k] if k in self.metrics else self._plain_metrics[k])(outputs, targets) for k in self._order
        ]
        return (loss, *scores)


@contextlib.contextmanager
def _modes_kept(*things: Any) -> Iterator[None]:
    modules = [m for thing in things if isinstance(thing, nn.Module) for m in thing.modules()]
    modes = [m.training for m in modules]
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def _evaluate(
    whole: _Whole, sample: Mapping[str, torch.Tensor], metrics: Mapping[str, Any]
) -> tuple[torch.Tensor, ...]:
    """One plain evaluation of the model on the sample: what the graph must reproduce, and a first check of the user's
    code. Buffers are lent as copies, for models that change them even in evaluation."""
    whole.eval()
    buffers = {name: buffer.clone() for name, buffer in whole.named_buffers()}
    try:
        with torch.no_grad():
            results = torch.func.functional_call(whole, buffers, tuple(t.clone() for t in sample.values()))
    except Exception as error:
        raise CaptureError(
            f"the model fails on the first batch of train_data: {type(error).__name__}: {error}{_user_line(error)}; "
            "run model and loss on one batch by hand to see it"
        ) from error
    for name, result in zip(("loss", *(f"metric {m!r}" for m in metrics)), results, strict=True):
        if not isinstance(result, torch.Tensor):
            raise JobError(f"{name} must return a tensor, it returned a {type(result).__name__}; do not call .item()")
        if result.dim() != 0:
            shape = "x".join(map(str, result.shape))
            raise JobError(f"{name} must be one number, it returned a tensor of shape {shape}; end it with .mean()")
    if not results[0].is_floating_point():
        raise JobError(f"loss must be a floating-point number, it returned {results[0].dtype}")
    return tuple(results)


def _at_least_two(sample: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The sample with a batch of two or more: a size of one would be captured as fixed."""
    sized = [t for t in sample.values() if t.dim()]
    if sized and all(t.shape[0] == 1 for t in sized):
        return tuple(torch.cat([t, t]) if t.dim() else t.clone() for t in sample.values())
    return tuple(t.clone() for t in sample.values())


def _free_sizes(flat: Sequence[Mapping[str, torch.Tensor]]) -> tuple[dict[int, Any], ...]:
    free = []
    for name, first in flat[0].items():
        sizes = {0} if first.dim() else set()
        for other in flat[1:]:
            if other[name].dim() == first.dim():
                sizes |= {d for d in range(first.dim()) if other[name].shape[d] != first.shape[d]}
        free.append({d: torch.export.Dim.AUTO for d in sorted(sizes)})
    return tuple(free)


def _export(whole: _Whole, tensors: tuple[torch.Tensor, ...], free: tuple[dict[int, Any], ...]) -> Any:
    try:
        with _quiet():
            return torch.export.export(whole, tensors, dynamic_shapes=(free,), strict=False)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CaptureError(
            f"the model cannot be captured{_user_line(error)}: {reason[:300]}; {_advice(error)}"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch prints whole graphs beside the error it raises; the error is all a user needs."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _advice(error: Exception) -> str:
    if "data" in type(error).__name__.lower() or "data-dependent" in str(error):
        return (
            "the path through the model must not depend on the values in a tensor: use torch.where or a mask in place "
            "of `if`, and avoid .item(), .tolist() and numpy in forward"
        )
    return "use plain torch operators there, on whole tensors and without numpy, .item() or .tolist()"


def _user_line(error: BaseException) -> str:
    """` at file:line (code)` of the innermost frame that is the user's, or nothing where there is none."""
    torch_home = str(Path(torch.__file__).parent)
    own_home = str(Path(__file__).parents[1])
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((torch_home, own_home, "<"))
    ]
    own = [f for f in frames if "site-packages" not in f.filename] or frames
    if not own:
        return ""
    frame = own[-1]
    return f" at {frame.filename}:{frame.lineno} (`{frame.line}`)"


def _trained_names(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad)


def _state_names(
    model: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The model's own state_dict, and which of its names are second names for a tensor: name -> the graph's key for
    it."""
    state = {k: v for k, v in model.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)}
    owner = {id(tensor): name for name, tensor in reversed(state.items())}
    owner.update({id(tensor): key for key, tensor in tensors.items()})
    aliases = {name: owner[id(tensor)] for name, tensor in state.items() if owner[id(tensor)] != name}
    return state, aliases


def _refuse_shared_memory(model: nn.Module) -> None:
    """CaptureError for two parameters over one memory: PyTorch would update it twice, a swarm each on its own."""
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p in model.named_parameters()
        if p.numel()
    )
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            raise CaptureError(
                f"the parameters {first} and {second} are two parameters over the same memory; tie them by assigning "
                "the parameter itself, as in head.weight = embedding.weight"
            )


def _with_gradients(
    graph: PortableGraph, weights: Mapping[str, torch.Tensor], sample: Mapping[str, torch.Tensor]
) -> PortableGraph:
    """The graph with `needs_grad` of every value as one real training forward shows it."""
    program = Program(graph)
    leaves = {p.name: weights[p.key].detach().requires_grad_() for p in graph.parameters}
    others = {w.name: weights[w.key].clone() for w in (*graph.constants, *graph.states)}
    env = program.environment(sample, {**leaves, **others})
    needs: dict[str, bool] = {}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for step in program.train_steps:
            step.call(env)
            result = env[program.slot(step.node.name)]
            # A view taken under no_grad claims to require a gradient, yet nothing leads back from it.
            needs[step.node.name] = step.node.grad and isinstance(result, torch.Tensor) and result.requires_grad
            for slot in step.frees:
                env[slot] = None
    if graph.loss is not None and not needs.get(graph.loss, False):
        raise JobError(
            "loss does not depend on any trainable parameter; check requires_grad and detach() in model and loss"
        )
    nodes = tuple(
        replace(n, output=None if n.output is None else replace(n.output, needs_grad=needs.get(n.name, False)))
        for n in graph.nodes
    )
    return replace(graph, nodes=nodes)


def _compare(
    graph: PortableGraph,
    weights: Mapping[str, torch.Tensor],
    sample: Mapping[str, torch.Tensor],
    expected: tuple[torch.Tensor, ...],
    metrics: Mapping[str, Any],
) -> None:
    named = {w.name: weights[w.key] for w in graph.weights}
    with torch.no_grad():
        results = Program(graph).run(sample, named, train=False)
    for name, value, want in zip(("loss", *metrics), [graph.loss, *graph.metrics.values()], expected, strict=True):
        have = results[str(value)]
        if not torch.allclose(have.double(), want.double(), rtol=1e-3, atol=1e-5, equal_nan=True):
            raise CaptureError(
                f"in evaluation the captured {name} is {have.item():.6g} where the model's own is {want.item():.6g}: "
                "the model does something else in eval() than dropout, batch norm and attention dropout; express that "
                "difference without `if self.training`"
            )

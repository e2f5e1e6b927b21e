"""Capture of a model, its loss and its metrics as one portable graph, without changing the model.

The requester's Python runs here and nowhere else. The model is exported in training mode, with a free batch size; each
module is in the mode that the user left it in (modes.py). Custom backward passes and hooks are traced as well
(traced_gradients.py). Before the graph is returned, it trains and evaluates the first batch next to the model itself
(capture_check.py): a different loss, metric, gradient or buffer is a CaptureError now instead of a surprise after a day
of training. If evaluation differs by more than the train/eval switch can express, the model is exported a second time,
in evaluation mode (evaluation_alignment.py).
"""

import contextlib
import io
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ravnest.errors import CaptureError, JobError
from ravnest.graph.batch import Structure
from ravnest.graph.capture.capture_check import evaluation_difference, own_evaluation, own_training, with_gradients
from ravnest.graph.capture.evaluation_alignment import aligned
from ravnest.graph.capture.lower import Lowered, lower
from ravnest.graph.capture.modes import frozen_modules, left_as_it_was, set_modes, training_modes
from ravnest.graph.capture.traced_gradients import traced
from ravnest.graph.capture.traced_hooks import hooks_of_parameters, refuse_hooks, trace_parameter_hooks
from ravnest.graph.capture.users_line import line_of_error
from ravnest.graph.portable import PortableGraph
from ravnest.graph.switch import draws_in_evaluation


@dataclass(frozen=True, slots=True)
class Captured:
    """A model as data, with everything that is needed to restore it under its own names."""

    graph: PortableGraph
    weights: Mapping[str, torch.Tensor]
    """Initial value of every parameter, constant and state, by key. They share the model's memory: copy before
    changing."""
    structure: Structure
    sample: Mapping[str, torch.Tensor]
    """The first batch, by input name."""
    aliases: Mapping[str, str]
    """Names in the model's state_dict that share another entry's tensor (tied weights) -> that entry's key."""
    static: Mapping[str, torch.Tensor]
    """Entries of the state_dict that the graph never uses; they are returned unchanged."""
    not_saved: frozenset[str]
    """Keys of weights that are not in the state_dict (non-persistent buffers, constants inside forward)."""
    frozen_modules: tuple[str, ...] = ()
    """Modules that the user put in eval(), which remain in it while the rest trains."""


def capture(
    model: nn.Module, loss: Callable[..., Any], metrics: Mapping[str, Callable[..., Any]], batches: Sequence[Any]
) -> Captured:
    """The portable graph of model, loss and metrics, captured on one or two batches. Sizes that differ remain free.

    A CaptureError names the line of the user's code that cannot be captured; a JobError says what is wrong with the
    data.
    """
    _refuse_shared_memory(model)
    refuse_hooks(model)
    structure = Structure.of(batches[0])
    flat = [structure.flatten(batch) for batch in batches]
    sample = {name: tensor.clone() for name, tensor in flat[0].items()}
    whole = _Whole(model, loss, metrics, structure)
    modes = {**{m: m.training for m in whole.modules()}, **training_modes(model)}
    shapes = (_at_least_two(sample), _free_sizes(flat))
    with left_as_it_was(model, loss, *metrics.values()):
        whole.eval()
        expected = own_evaluation(whole, sample)
        _refuse_results(expected, metrics)
        set_modes(modes)
        lowered = _lowered(whole, shapes, tuple(sample), metrics)
        difference = evaluation_difference(lowered, whole, sample, expected)
        # One batch cannot show whether a model that draws random numbers evaluates as its graph does.
        if difference or draws_in_evaluation(lowered.graph):
            whole.eval()
            lowered = _with_evaluation(lowered, whole, shapes, sample, expected, difference)
            set_modes(modes)
        own = own_training(whole.without_metrics(), sample)
        graph = with_gradients(lowered, whole, sample, own)
    tensors = lowered.weights
    keys, aliases = _state_names(model, tensors)
    used = {w.key for w in graph.weights}
    return Captured(
        graph=graph,
        weights={w.key: tensors[w.key].detach() for w in graph.weights},
        structure=structure,
        sample=sample,
        aliases={name: owner for name, owner in aliases.items() if owner in used},
        static={name: tensor.detach() for name, tensor in keys.items() if aliases.get(name, name) not in used},
        not_saved=frozenset(used - set(keys)),
        frozen_modules=tuple(frozen_modules(model, modes)),
    )


def _lowered(whole: "_Whole", shapes: Any, inputs: tuple[str, ...], metrics: Mapping[str, Any]) -> Lowered:
    exported, calls = _export(whole, *shapes)
    return lower(exported, calls, inputs, ("loss", *metrics), trained=_trained_names(whole.model))


def _with_evaluation(
    lowered: Lowered,
    whole: "_Whole",
    shapes: Any,
    sample: Mapping[str, torch.Tensor],
    expected: Sequence[torch.Tensor],
    difference: str,
) -> Lowered:
    """The graph with the evaluation of the model, which is in evaluation mode; CaptureError if that cannot be
    captured."""
    names = [metric for metric in lowered.graph.metrics]
    try:
        found = aligned(lowered, _lowered(whole, shapes, tuple(sample), dict.fromkeys(names)))
    except CaptureError as error:
        told = f"in evaluation {difference}, and " if difference else "in evaluation "
        raise CaptureError(f"{told}{error}") from error
    if difference := evaluation_difference(found, whole, sample, expected):
        raise CaptureError(
            f"in evaluation {difference}: the model behaves differently in eval() from when it is captured"
        )
    return found


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
        self._hooks = hooks_of_parameters(model)

    def without_metrics(self) -> "_Whole":
        """The same module, but returning the loss alone, as in training."""
        return _Whole(self.model, self.loss, {}, self._structure)

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        if torch.compiler.is_exporting():
            trace_parameter_hooks(self.model, self._hooks)
        inputs, targets = self._structure.unflatten(tensors)
        outputs = self._structure.call(self.model, inputs)
        loss = self.loss(outputs, targets)
        scores = [
            (self.metrics[k] if k in self.metrics else self._plain_metrics[k])(outputs, targets) for k in self._order
        ]
        return (loss, *scores)


def _refuse_results(results: Sequence[Any], metrics: Mapping[str, Any]) -> None:
    """JobError unless the loss and each metric are tensors with one number."""
    for name, result in zip(("loss", *(f"metric {m!r}" for m in metrics)), results, strict=True):
        if not isinstance(result, torch.Tensor):
            raise JobError(f"{name} must return a tensor, but returned a {type(result).__name__}; do not call .item()")
        if result.dim() != 0:
            shape = "x".join(map(str, result.shape))
            raise JobError(f"{name} must return one number, but returned shape {shape}; end it with .mean()")
    if not results[0].is_floating_point():
        raise JobError(f"loss must return a floating-point number, but returned {results[0].dtype}")


def _at_least_two(sample: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The sample with a batch size of two or more: torch.export captures a size of one as fixed."""
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


def _export(
    whole: _Whole, tensors: tuple[torch.Tensor, ...], free: tuple[dict[int, Any], ...]
) -> tuple[Any, list[str]]:
    try:
        with _quiet(), traced() as calls:
            return torch.export.export(whole, tensors, dynamic_shapes=(free,), strict=False), calls
    except CaptureError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CaptureError(
            f"the model cannot be captured{line_of_error(error)}: {reason[:300]}; {_advice(error)}"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the graphs that torch prints in addition to the error that it raises."""
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
            "the path through the model must not depend on the values in a tensor: use torch.where or a mask instead "
            "of `if`, and avoid .item(), .tolist() and numpy in forward"
        )
    return "use torch operators on whole tensors there, without numpy, .item() or .tolist()"


def _trained_names(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad)


def _state_names(
    model: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The model's own state_dict, and the graph's key for each of its names that is a second name for a tensor."""
    state = {k: v for k, v in model.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)}
    owner = {id(tensor): name for name, tensor in reversed(state.items())}
    owner.update({id(tensor): key for key, tensor in tensors.items()})
    aliases = {name: owner[id(tensor)] for name, tensor in state.items() if owner[id(tensor)] != name}
    return state, aliases


def _refuse_shared_memory(model: nn.Module) -> None:
    """CaptureError for two parameters that share memory: PyTorch would update it twice, a swarm each separately."""
    spans = sorted(
        (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p in model.named_parameters()
        if p.numel()
    )
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            raise CaptureError(
                f"the parameters {first} and {second} share memory, but are two parameters; tie them by assigning the "
                "parameter itself, as in head.weight = embedding.weight"
            )

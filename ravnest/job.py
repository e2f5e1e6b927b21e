"""Training job, as the requester declares it: model, data, loss, optimizer and settings.

A Job is checked when it is constructed, before any provider is involved. Each mistake is a JobError: one sentence that
names the field and the fix. Constructing a Job does not modify its arguments.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import Dataset

from ravnest.errors import JobError
from ravnest.settings import Averaging, Checkpoint, Pipeline, check_whole
from ravnest.spec import OptimizerSpec, ScheduleSpec, optimizer_refusal, schedule_refusal, split_partial

if TYPE_CHECKING:
    from ravnest.coordinator.launch.session import TrainResult

Loss = Callable[..., torch.Tensor]
"""Called with (outputs, targets) of a microbatch; returns a scalar, the mean over the samples."""

Metric = Callable[..., torch.Tensor]
"""Called like a loss; returns a scalar, the mean over the samples."""

Batches = Iterable[Any] | Callable[[], Iterable[Any]]
"""An iterable of (inputs, targets), or a function that returns one; inputs are a tensor, tuple or dict."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """One training job. All fields are keyword arguments and remain available as attributes."""

    model: nn.Module
    """The model to train. It is not modified; the trained weights are written to the run's model.safetensors."""

    loss: Loss
    """Called as loss(outputs, targets); returns the scalar to minimise."""

    train_data: Batches
    """Training data. Each (inputs, targets) that it yields is one microbatch."""

    optimizer: Any
    """A torch.optim class, or a functools.partial of one with plain keyword arguments."""

    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Additional numbers to report in evaluations: name -> function, called as function(outputs, targets)."""

    eval_data: Batches | None = None
    """Evaluation data, in the form of `train_data`. None: no evaluation."""

    schedule: Any = None
    """A torch.optim.lr_scheduler class, or a functools.partial of one. It is stepped once per update, not per epoch:
    `T_max`, `total_steps`, `step_size` and the like count updates. None: a constant learning rate."""

    epochs: int = 1
    """Passes over `train_data`."""

    max_updates: int | None = None
    """Stop after this many updates, even within an epoch. None: train all epochs."""

    eval_every: int = 1
    """Epochs between two evaluations; the last epoch is always followed by one."""

    seed: int = 0
    """Seed of all random numbers in the model. With one microbatch in flight, a run is exactly reproducible."""

    pipeline: Pipeline = field(default_factory=Pipeline)
    """How microbatches flow through the stages."""

    averaging: Averaging = field(default_factory=Averaging)
    """How several clusters average their parameters."""

    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """When checkpoints are written."""

    def __post_init__(self) -> None:
        _check_model(self.model)
        _check_function("loss", self.loss)
        # Users write None for "no metrics"; code that reads the job always gets a mapping.
        object.__setattr__(self, "metrics", _checked_metrics(self.metrics))
        check_whole("epochs", self.epochs, minimum=1)
        check_whole("max_updates", self.max_updates, minimum=1, optional=True)
        check_whole("eval_every", self.eval_every, minimum=1)
        check_whole("seed", self.seed, minimum=0)
        if self.seed >= 2**63:
            raise JobError(f"seed is {self.seed}: give a whole number below 2**63")
        _check_data("train_data", self.train_data, self.epochs)
        if self.eval_data is not None:
            _check_data("eval_data", self.eval_data, self.epochs)
        if not isinstance(self.pipeline, Pipeline):
            raise JobError(f"pipeline is {_named(self.pipeline)}: give ravnest.Pipeline(...)")
        if not isinstance(self.averaging, Averaging):
            raise JobError(f"averaging is {_named(self.averaging)}: give ravnest.Averaging(...)")
        if not isinstance(self.checkpoint, Checkpoint):
            raise JobError(f"checkpoint is {_named(self.checkpoint)}: give ravnest.Checkpoint(...)")
        optimizer, schedule = _checked_specs(self.optimizer, self.schedule, self.model)
        object.__setattr__(self, "_optimizer_spec", optimizer)
        object.__setattr__(self, "_schedule_spec", schedule)

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        """Optimizer in the form that providers receive."""
        spec: OptimizerSpec = self.__dict__["_optimizer_spec"]
        return spec

    @property
    def schedule_spec(self) -> ScheduleSpec | None:
        """Schedule in the form that providers receive; None for a constant learning rate."""
        spec: ScheduleSpec | None = self.__dict__["_schedule_spec"]
        return spec

    def train_batches(self) -> Iterator[Any]:
        """One pass over the training data; raises JobError if the given function does not return an iterable.

        An iterator can be used for one pass only; everything else starts from the beginning at each call.
        """
        return _batches("train_data", self.train_data)

    def eval_batches(self) -> Iterator[Any]:
        """One pass over the evaluation data, empty if there is none; fails like `train_batches`."""
        return iter(()) if self.eval_data is None else _batches("eval_data", self.eval_data)

    def train(
        self,
        *,
        providers: int = 2,
        clusters: int = 1,
        run: str | PathLike[str] | None = None,
        resume: bool = False,
        display: bool = True,
        devices: Sequence[str] = ("auto",),
    ) -> "TrainResult":
        """Trains on an embedded swarm of `providers` processes on this machine, like `ravnest train`.

        The providers form `clusters` clusters, each with a full copy of the model, and take turns through the `devices`
        (auto, cpu, cuda:0, mps). Progress is written to stderr, unless `display` is False.

        The result has the summary of the run (`summary`, as in summary.json), the run directory (`run`) and the path of
        the trained model (`model`). Ctrl-C and SIGTERM stop the run cleanly: its state is saved, and the status in the
        summary is "stopped". Raises a RavnestError if the run cannot start or continue; everything saved before stays
        in the run directory, and `resume` continues from it.
        """
        from ravnest.coordinator.launch.embedded import train

        return train(
            self, providers=providers, clusters=clusters, run=run, resume=resume, display=display, devices=devices
        )


def _check_model(model: object) -> None:
    if isinstance(model, type):
        raise JobError(f"model is the class {model.__name__}: pass an instance, {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise JobError(f"model is {_named(model)}: pass a torch.nn.Module")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise JobError(
                f"model has the uninitialised parameter {name} of a lazy module: run a batch through it first"
            )
        if parameter.is_meta:
            raise JobError(f"model has the parameter {name} on the meta device, without values: initialise it first")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise JobError("model has no trainable parameter: add one, or set requires_grad on the parameters to train")


def _check_function(name: str, function: object) -> None:
    if isinstance(function, type):
        raise JobError(f"{name} is the class {function.__name__}: pass an instance, {function.__name__}()")
    if not callable(function):
        raise JobError(f"{name} is {_named(function)}: pass a function of (outputs, targets)")
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return  # A built-in without a signature; capture reports the error if there is one.
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise JobError(f"{name} cannot be called with (outputs, targets), {error}: give it two arguments") from error


def _checked_metrics(metrics: object) -> dict[str, Metric]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise JobError(f'metrics is {_named(metrics)}: pass a dict such as {{"accuracy": accuracy}}')
    for name, function in metrics.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise JobError(f"metrics has the name {name!r}: use letters, digits and underscores, like a variable")
        if name == "loss":
            raise JobError('metrics has the name "loss", which is the loss itself: choose another name')
        _check_function(f'metrics["{name}"]', function)
    return dict(metrics)


def _check_data(name: str, data: object, epochs: int) -> None:
    wanted = "an iterable of (inputs, targets) batches, such as a DataLoader, or a function that returns one"
    if isinstance(data, Dataset) and not hasattr(data, "__iter__"):
        raise JobError(f"{name} is a Dataset of single samples: wrap it in DataLoader(dataset, batch_size=32)")
    if isinstance(data, str | bytes | Mapping | torch.Tensor) or not (hasattr(data, "__iter__") or callable(data)):
        raise JobError(f"{name} is {_named(data)}: pass {wanted}")
    if isinstance(data, Iterator) and epochs > 1:
        raise JobError(
            f"{name} is an iterator, which is exhausted after the first of {epochs} epochs: "
            "pass a function that returns a new iterator"
        )


def _checked_specs(optimizer: object, schedule: object, model: nn.Module) -> tuple[OptimizerSpec, ScheduleSpec | None]:
    parts = split_partial("optimizer", optimizer)
    if isinstance(parts, str):
        raise JobError(f"optimizer {parts}")
    optimizer_spec = OptimizerSpec(*parts)
    # Some optimizers restrict the shapes (Muon takes only matrices), so the check uses the model's dimensions.
    dimensions = sorted({parameter.dim() for parameter in model.parameters() if parameter.requires_grad})
    refusal = optimizer_refusal(optimizer_spec, dimensions)
    if refusal is not None:
        raise JobError(f"optimizer {refusal}")
    if schedule is None:
        return optimizer_spec, None
    parts = split_partial("schedule", schedule)
    if isinstance(parts, str):
        raise JobError(f"schedule {parts}")
    schedule_spec = ScheduleSpec(*parts)
    refusal = schedule_refusal(schedule_spec, optimizer_spec)
    if refusal is not None:
        raise JobError(f"schedule {refusal}")
    return optimizer_spec, schedule_spec


def _batches(name: str, data: Batches) -> Iterator[Any]:
    if isinstance(data, Iterable):
        return iter(data)
    given = data()
    if not isinstance(given, Iterable):
        raise JobError(f"{name} is a function that returned {_named(given)}: return an iterable of (inputs, targets)")
    return iter(given)


def _named(value: object) -> str:
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"

"""A Job is checked when it is made: each mistake names its field and the fix; nothing given is changed."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ravnest import Averaging, Checkpoint, Job, JobError, Pipeline

# Called wrongly on purpose below, which a type checker would rightly refuse.
SGD: Any = torch.optim.SGD
Cosine: Any = lr_scheduler.CosineAnnealingLR

BATCH = (torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(dim=1) == targets).float().mean()


def make(**changes: Any) -> Job:
    fields: dict[str, Any] = {
        "model": nn.Linear(3, 2),
        "loss": F.cross_entropy,
        "train_data": [BATCH],
        "optimizer": partial(torch.optim.AdamW, lr=1e-3),
    }
    return Job(**{**fields, **changes})


def refused(**changes: Any) -> str:
    """The message of the JobError that these fields lead to, checked to be one line."""
    with pytest.raises(JobError) as caught:
        make(**changes)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_was_given_stays_reachable_under_the_same_names() -> None:
    given: dict[str, Any] = {
        "model": nn.Linear(3, 2),
        "loss": nn.CrossEntropyLoss(),
        "train_data": [BATCH],
        "eval_data": [BATCH],
        "optimizer": partial(torch.optim.AdamW, lr=1e-3),
        "schedule": partial(lr_scheduler.CosineAnnealingLR, T_max=100),
        "metrics": {"accuracy": accuracy},
        "epochs": 3,
        "max_updates": 7,
        "eval_every": 2,
        "seed": 5,
        "pipeline": Pipeline(in_flight=2),
        "averaging": Averaging(every=1000, codec="int8"),
        "checkpoint": Checkpoint(keep=1),
    }
    job = Job(**given)
    for name, value in given.items():
        assert getattr(job, name) == value, name
    assert job.model is given["model"]
    assert job.train_data is given["train_data"]


def test_making_a_job_changes_nothing_about_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    before = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    Job(
        model=model,
        loss=F.cross_entropy,
        train_data=[BATCH],
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        schedule=partial(lr_scheduler.StepLR, step_size=2),
    )
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random_state, torch.get_rng_state())


def test_specs_say_what_travels_to_providers() -> None:
    job = make(schedule=partial(lr_scheduler.MultiStepLR, milestones=[5, 9]))
    assert (job.optimizer_spec.name, dict(job.optimizer_spec.arguments)) == ("AdamW", {"lr": 1e-3})
    assert job.schedule_spec is not None
    assert dict(job.schedule_spec.arguments) == {"milestones": (5, 9)}
    assert make().schedule_spec is None
    assert make(optimizer=torch.optim.Adam).optimizer_spec.arguments == {}


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Linear, "model is the class Linear: pass an instance"),
        (lambda inputs: inputs, "model is a function: pass a torch.nn.Module"),
        (None, "model is None: pass a torch.nn.Module"),
        (nn.ReLU(), "model has no trainable parameter"),
        (nn.Linear(2, 2).requires_grad_(False), "model has no trainable parameter"),
        (nn.LazyLinear(2), "lazy module: run a batch through it first"),
        (nn.Linear(2, 2, device="meta"), "meta device"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(model: Any, says: str) -> None:
    assert says in refused(model=model)


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("cross_entropy", "loss is a str: pass a function of (outputs, targets)"),
        (None, "loss is None"),
        (nn.CrossEntropyLoss, "loss is the class CrossEntropyLoss: pass an instance"),
        (lambda outputs: outputs, "loss cannot be called with (outputs, targets)"),
        (nn.ReLU(), "loss cannot be called with (outputs, targets)"),
    ],
)
def test_a_loss_that_cannot_be_called_is_refused(loss: Any, says: str) -> None:
    assert says in refused(loss=loss)


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ([accuracy], "metrics is a list: pass a dict"),
        ({"loss": accuracy}, 'metrics has the name "loss"'),
        ({"top 5": accuracy}, "metrics has the name 'top 5'"),
        ({3: accuracy}, "metrics has the name 3"),
        ({"accuracy": 0.5}, 'metrics["accuracy"] is 0.5'),
        ({"accuracy": lambda a: a}, 'metrics["accuracy"] cannot be called'),
    ],
)
def test_metrics_with_wrong_names_or_functions_are_refused(metrics: Any, says: str) -> None:
    assert says in refused(metrics=metrics)


def test_no_metrics_reads_as_an_empty_mapping() -> None:
    assert make().metrics == {}
    assert make(metrics=None).metrics == {}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield BATCH


def generator() -> Iterator[Any]:
    yield BATCH
    yield BATCH


@pytest.mark.parametrize(
    "data",
    [
        [BATCH],
        DataLoader(TensorDataset(*BATCH), batch_size=2),
        Stream(),
        generator,
        lambda: [BATCH],
    ],
)
def test_any_iterable_or_function_that_returns_one_can_be_passed_over_again(data: Any) -> None:
    job = make(train_data=data, eval_data=data, epochs=2)
    first, second = list(job.train_batches()), list(job.train_batches())
    assert len(first) == len(second) > 0
    assert len(list(job.eval_batches())) == len(first)


def test_an_iterator_is_accepted_for_one_epoch_only() -> None:
    assert len(list(make(train_data=generator(), epochs=1).train_batches())) == 2
    assert "train_data is an iterator" in refused(train_data=generator(), epochs=2)
    assert "pass a function" in refused(train_data=generator(), epochs=2)
    assert "eval_data is an iterator" in refused(eval_data=iter([BATCH]), epochs=2)


@pytest.mark.parametrize("field", ["train_data", "eval_data"])
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (3, "is 3: pass an iterable"),
        ("data.csv", "is a str: pass an iterable"),
        (torch.zeros(3), "is a Tensor: pass an iterable"),
        ({"inputs": BATCH[0]}, "is a dict: pass an iterable"),
        (TensorDataset(*BATCH), "is a Dataset of single samples: wrap it in DataLoader"),
    ],
)
def test_data_that_yields_no_batches_is_refused(field: str, data: Any, says: str) -> None:
    assert f"{field} {says}" in refused(**{field: data})


def test_train_data_cannot_be_left_out_by_passing_none() -> None:
    assert "train_data is None" in refused(train_data=None)


def test_a_data_function_that_returns_no_iterable_is_named_when_it_is_called() -> None:
    with pytest.raises(JobError, match="train_data is a function that returned None"):
        make(train_data=lambda: None).train_batches()


def test_a_job_without_evaluation_data_has_no_evaluation_batches() -> None:
    assert list(make().eval_batches()) == []


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1), "pass partial(torch.optim.AdamW, lr=1e-3)"),
        ("adam", "optimizer is 'adam', not a class of torch.optim"),
        (None, "optimizer is None"),
        (lambda parameters: None, "optimizer is the function <lambda>"),
        (dict, "optimizer dict is not in torch.optim"),
        (torch.optim.LBFGS, "LBFGS evaluates the model several times"),
        (torch.optim.SparseAdam, "SparseAdam needs sparse gradients"),
        (partial(SGD, 0.1), "positional arguments"),
        (partial(torch.optim.SGD, lr=torch.tensor(0.1)), "SGD's argument lr is a Tensor"),
        (partial(torch.optim.SGD, lr=float("nan")), "SGD's argument lr is nan"),
        (partial(torch.optim.SGD, lr=-1.0), "SGD(lr=-1.0) is refused by torch (Invalid learning rate: -1.0)"),
        (partial(SGD, learning_rate=1), "unexpected keyword argument 'learning_rate'"),
        (partial(SGD, lr="fast"), "optimizer SGD(lr='fast') is refused by torch"),
        (partial(torch.optim.AdamW, betas=(0.9, 1.5)), "Invalid beta parameter"),
        (partial(torch.optim.AdamW, capturable=True), "optimizer AdamW(capturable=True) is refused"),
        (torch.optim.Muon, "Muon only supports 2D parameters"),
    ],
)
def test_an_optimizer_that_cannot_travel_or_work_is_refused(optimizer: Any, says: str) -> None:
    message = refused(optimizer=optimizer)
    assert says in message
    assert message.startswith("optimizer ")


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0), "LambdaLR needs a Python function"),
        (partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda step: 1.0), "needs a Python function"),
        (lr_scheduler.SequentialLR, "SequentialLR combines other schedules"),
        (lr_scheduler.ChainedScheduler, "ChainedScheduler combines other schedules"),
        (lr_scheduler.ReduceLROnPlateau, "ReduceLROnPlateau waits for an evaluation"),
        (torch.optim.swa_utils.SWALR, "SWALR belongs to weight averaging"),
        (torch.optim.SGD, "SGD is not in torch.optim.lr_scheduler: use one of"),
        ("cosine", "schedule is 'cosine'"),
        (lr_scheduler.StepLR, "step_size"),
        (partial(Cosine, T_max="long"), "schedule CosineAnnealingLR(T_max='long')"),
        (partial(lr_scheduler.CosineAnnealingLR, T_max=0), "schedule CosineAnnealingLR(T_max=0)"),
        (partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=1.0, scale_fn=abs), "argument scale_fn"),
        (partial(lr_scheduler.StepLR, step_size=1, last_epoch=3), "last_epoch=3"),
    ],
)
def test_a_schedule_that_cannot_travel_or_work_is_refused(schedule: Any, says: str) -> None:
    message = refused(schedule=schedule)
    assert says in message
    assert message.startswith("schedule ")


def test_a_schedule_instance_is_refused_with_the_form_to_use() -> None:
    bound = lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1), step_size=1)
    assert "pass partial(torch.optim.lr_scheduler.CosineAnnealingLR" in refused(schedule=bound)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("epochs", 1.5),
        ("epochs", True),
        ("epochs", None),
        ("max_updates", 0),
        ("eval_every", 0),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_a_wrong_number_names_its_field(field: str, value: Any) -> None:
    assert refused(**{field: value}).startswith(f"{field} is {value!r}: give a whole number")


def test_nested_settings_of_the_wrong_type_are_refused() -> None:
    assert "pipeline is a dict: give ravnest.Pipeline(...)" in refused(pipeline={"in_flight": 1})
    assert "averaging is a str: give ravnest.Averaging(...)" in refused(averaging="mean")
    assert "checkpoint is 60: give ravnest.Checkpoint(...)" in refused(checkpoint=60)

"""Settings refuse what makes no sense, and `--set` replaces them by name."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ravnest import Averaging, Checkpoint, Job, JobError, Pipeline
from ravnest.averaging.outer.outer import outer_named
from ravnest.codecs.codec import CODECS
from ravnest.overrides import apply_overrides
from ravnest.settings import AVERAGING_CODECS, OUTER_OPTIMIZERS


def a_job(**changes: Any) -> Job:
    fields: dict[str, Any] = {
        "model": nn.Linear(2, 1),
        "loss": nn.functional.mse_loss,
        "train_data": [(torch.zeros(1, 2), torch.zeros(1, 1))],
        "optimizer": partial(torch.optim.SGD, lr=0.1),
    }
    return Job(**{**fields, **changes})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("in_flight", 0),
        ("in_flight", True),
        ("in_flight", 2.0),
        ("max_staleness", -1),
        ("accumulate", 0),
        ("accumulate", None),
        ("clip_norm", 0.0),
        ("clip_norm", float("nan")),
        ("clip_value", float("inf")),
        ("clip_value", "1"),
        ("record_updates", 1),
    ],
)
def test_a_wrong_pipeline_value_names_its_field_and_the_value(field: str, value: object) -> None:
    with pytest.raises(JobError, match=rf"pipeline\.{field} is {value!r}: give"):
        Pipeline(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"), [("every_seconds", 0), ("every_seconds", -1.0), ("every_updates", 0), ("keep", 0)]
)
def test_a_wrong_checkpoint_value_names_its_field_and_the_value(field: str, value: Any) -> None:
    with pytest.raises(JobError, match=rf"checkpoint\.{field} is {value!r}: give"):
        Checkpoint(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("every", 0),
        ("every", 1.5),
        ("outer", "adam"),
        ("outer", None),
        ("outer_rate", 0.0),
        ("outer_momentum", 1.0),
        ("outer_momentum", -0.1),
        ("outer_momentum", float("nan")),
        ("outer_momentum", True),
        ("codec", "int2"),
        ("codec", 8),
        ("blocking", "yes"),
        ("optimizer_state", 0),
        ("fragments", 0),
        ("outlier", 0.0),
        ("outlier", 1.0),
        ("outlier", float("inf")),
    ],
)
def test_a_wrong_averaging_value_names_its_field_and_the_value(field: str, value: Any) -> None:
    with pytest.raises(JobError, match=rf"averaging\.{field} is {value!r}: give"):
        Averaging(**{"outer": "nesterov", field: value})


def test_an_unknown_codec_gets_the_list_of_those_there_are() -> None:
    with pytest.raises(JobError, match="give one of auto, float32, lossless, float16, bfloat16, int8, int4"):
        Averaging(codec="gzip")


def test_the_mean_has_a_rate_and_no_momentum() -> None:
    assert Averaging(outer="nesterov", outer_momentum=0.5).outer_momentum == 0.5
    assert Averaging(outer_rate=0.5).outer_rate == 0.5
    with pytest.raises(JobError, match=r'averaging\.outer_momentum is set, and averaging\.outer="mean" has none'):
        Averaging(outer_momentum=0.5)


def test_every_codec_and_outer_optimizer_that_can_be_set_is_there() -> None:
    assert set(AVERAGING_CODECS) == {"auto", *CODECS}
    for name in OUTER_OPTIMIZERS:
        assert outer_named(name).name == name
    assert outer_named("mean", rate=0.5).name == "mean"


def test_outliers_can_be_left_as_they_are() -> None:
    assert Averaging(outlier=None).outlier is None


def test_checkpoints_can_be_switched_off_but_for_the_last() -> None:
    assert Checkpoint(every_seconds=None).every_updates is None


def test_two_kinds_of_clipping_at_once_are_refused() -> None:
    with pytest.raises(JobError, match=r"clip_norm and pipeline\.clip_value"):
        Pipeline(clip_norm=1.0, clip_value=1.0)


def test_settings_cannot_be_changed_after_they_were_checked() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Pipeline().in_flight = 0  # type: ignore[misc]


def test_overrides_make_a_new_job_and_leave_the_given_one_as_it_was() -> None:
    job = a_job()
    changed = apply_overrides(job, ["pipeline.in_flight=2", "epochs = 3", "checkpoint.every_seconds=none"])
    assert (changed.pipeline.in_flight, changed.epochs, changed.checkpoint.every_seconds) == (2, 3, None)
    assert (job.pipeline.in_flight, job.epochs, job.checkpoint.every_seconds) == (None, 1, 60.0)
    assert changed.model is job.model
    assert changed.pipeline.accumulate == job.pipeline.accumulate


def test_averaging_can_be_set_by_name() -> None:
    changed = apply_overrides(a_job(), ["averaging.codec=int8", "averaging.every=4096", "averaging.blocking=true"])
    assert changed.averaging == Averaging(codec="int8", every=4096, blocking=True)
    with pytest.raises(JobError, match=r"did you mean averaging\.codec"):
        apply_overrides(a_job(), ["averaging.codecs=int8"])


def test_overrides_that_make_sense_only_together_may_come_in_any_order() -> None:
    changed = apply_overrides(a_job(), ["averaging.outer_momentum=0.5", "averaging.outer=nesterov"])
    assert (changed.averaging.outer, changed.averaging.outer_momentum) == ("nesterov", 0.5)
    assert apply_overrides(a_job(), ["averaging.every=3", "averaging.every=5"]).averaging.every == 5


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("False", False), ("none", None), ("7", 7), ("1e-3", 1e-3), ("-2", -2)],
)
def test_values_are_read_by_their_kind(text: str, value: object) -> None:
    arguments = apply_overrides(a_job(), [f"optimizer.foreach={text}"]) if isinstance(value, bool) else None
    if arguments is not None:
        assert arguments.optimizer_spec.arguments["foreach"] is value
    elif value is None:
        assert apply_overrides(a_job(max_updates=3), ["max_updates=none"]).max_updates is None
    elif value == -2:
        with pytest.raises(JobError, match="max_updates is -2"):
            apply_overrides(a_job(), ["max_updates=-2"])
    else:
        changed = apply_overrides(a_job(), [f"optimizer.lr={text}"]).optimizer_spec.arguments["lr"]
        assert changed == value
        assert type(changed) is type(value)


def test_an_argument_of_the_optimizer_is_replaced_and_the_others_stay() -> None:
    job = a_job(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    changed = apply_overrides(job, ["optimizer.lr=0.5", "optimizer.nesterov=true"])
    assert changed.optimizer_spec.arguments == {"lr": 0.5, "momentum": 0.9, "nesterov": True}
    assert job.optimizer_spec.arguments == {"lr": 0.1, "momentum": 0.9}


def test_an_argument_of_the_schedule_can_be_set_only_where_there_is_a_schedule() -> None:
    job = a_job(schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=5))
    changed = apply_overrides(job, ["schedule.step_size=7"])
    assert changed.schedule_spec is not None
    assert changed.schedule_spec.arguments == {"step_size": 7}
    with pytest.raises(JobError, match="the job has no schedule"):
        apply_overrides(a_job(), ["schedule.step_size=7"])


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("epoch", "epochs"),
        ("pipeline.inflight", "pipeline.in_flight"),
        ("pipelin.clip_norm", "pipeline.clip_norm"),
        ("checkpoint.every_second", "checkpoint.every_seconds"),
        ("optimiser.lr", "optimizer.lr"),
    ],
)
def test_an_unknown_key_gets_the_nearest_known_one(key: str, near: str) -> None:
    with pytest.raises(JobError, match=rf"{key}: there is no such setting; did you mean {near}\?"):
        apply_overrides(a_job(), [f"{key}=1"])


def test_a_key_like_no_other_gets_the_list() -> None:
    with pytest.raises(JobError, match=r"the keys are epochs, .*pipeline\.in_flight"):
        apply_overrides(a_job(), ["zzzzzzzz=1"])


@pytest.mark.parametrize("key", ["model", "loss", "train_data", "pipeline", "optimizer", "optimizer."])
def test_what_has_no_plain_value_cannot_be_set(key: str) -> None:
    with pytest.raises(JobError, match="there is no such setting"):
        apply_overrides(a_job(), [f"{key}=1"])


@pytest.mark.parametrize("text", ["epochs", "=3", ""])
def test_an_override_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="write it as key=value"):
        apply_overrides(a_job(), [text])


def test_an_argument_torch_does_not_know_is_refused_by_name() -> None:
    with pytest.raises(JobError, match=r"optimizer SGD\(.*momentun"):
        apply_overrides(a_job(), ["optimizer.momentun=0.9"])

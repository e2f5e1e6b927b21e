"""A resumed run keeps the optimizer's state and takes the job's arguments."""

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ravnest import Job, RunError
from ravnest.coordinator.checkpoints.resume_optimizer import resumed_metadata, trained_with
from tests.e2e.jobs import a_job


def parts(*groups: dict[str, Any], schedule: Any = None) -> list[dict[str, str]]:
    """What two stages saved."""
    return [
        {
            "version": "7",
            "optimizer": json.dumps({"values": {f"layer{stage}:step": 7}, "groups": list(groups)}),
            "schedule": json.dumps(schedule),
        }
        for stage in range(2)
    ]


def resumed(saved: list[dict[str, str]], before: Job, now: Job) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The group and the schedule's state that the stages get."""
    found = resumed_metadata(saved, trained_with(before), now)
    assert found["version"] == "7"
    optimizer = json.loads(found["optimizer"])
    assert optimizer["values"] == {"layer0:step": 7, "layer1:step": 7}
    [group] = optimizer["groups"]
    return group, json.loads(found["schedule"])


def sgd(**arguments: Any) -> Job:
    schedule = arguments.pop("schedule", None)
    return a_job(optimizer=partial(torch.optim.SGD, **arguments), schedule=schedule)


def test_the_same_arguments_change_nothing() -> None:
    group = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0}
    assert resumed(parts(group), sgd(lr=0.1, momentum=0.9), sgd(lr=0.1, momentum=0.9)) == (group, None)


def test_the_same_state_is_the_same_text_however_it_was_cut() -> None:
    group = {"lr": 0.1, "momentum": 0.9}
    saved, job = parts(group, schedule={"a": 1, "b": 2}), sgd(lr=0.1, momentum=0.9)
    turned = parts(dict(reversed(group.items())), schedule={"b": 2, "a": 1})[::-1]
    assert resumed_metadata(saved, trained_with(job), job) == resumed_metadata(turned, trained_with(job), job)


def test_changed_arguments_are_the_jobs() -> None:
    group = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0}
    found, _ = resumed(parts(group), sgd(lr=0.1, momentum=0.9), sgd(lr=0.01, weight_decay=0.5))
    assert found == {"lr": 0.01, "momentum": 0, "weight_decay": 0.5}


def test_a_rate_that_a_schedule_has_moved_is_moved_as_far() -> None:
    schedule = partial(lr_scheduler.StepLR, step_size=5)
    group = {"lr": 0.01, "initial_lr": 0.1}
    state = {"base_lrs": [0.1], "_last_lr": [0.01], "last_epoch": 7, "step_size": 5}
    before, now = sgd(lr=0.1, schedule=schedule), sgd(lr=0.2, schedule=schedule)
    found, found_state = resumed(parts(group, schedule=state), before, now)
    assert found == pytest.approx({"lr": 0.02, "initial_lr": 0.2})
    assert found_state == {"base_lrs": [0.2], "_last_lr": [pytest.approx(0.02)], "last_epoch": 7, "step_size": 5}


def test_a_changed_schedule_keeps_how_far_it_has_come() -> None:
    group = {"lr": 0.01, "initial_lr": 0.1}
    state = {"base_lrs": [0.1], "_last_lr": [0.01], "last_epoch": 7, "step_size": 5}
    before = sgd(lr=0.1, schedule=partial(lr_scheduler.StepLR, step_size=5))
    now = sgd(lr=0.1, schedule=partial(lr_scheduler.StepLR, step_size=50))
    assert resumed(parts(group, schedule=state), before, now) == (group, {**state, "step_size": 50})


@pytest.mark.parametrize("schedule", [None, partial(lr_scheduler.ExponentialLR, gamma=0.9)], ids=["none", "another"])
def test_another_kind_of_schedule_starts_anew(schedule: Any) -> None:
    group = {"lr": 0.01, "initial_lr": 0.1, "momentum": 0}
    before = sgd(lr=0.1, schedule=partial(lr_scheduler.StepLR, step_size=5))
    found = resumed(parts(group, schedule={"last_epoch": 7}), before, sgd(lr=0.1, schedule=schedule))
    assert found == ({"momentum": 0}, None)


def test_another_optimizer_is_refused() -> None:
    with pytest.raises(RunError, match="was trained with SGD and its state does not fit AdamW; resume with the same"):
        resumed(parts({"lr": 0.1}), sgd(lr=0.1), a_job(optimizer=partial(torch.optim.AdamW, lr=0.1)))


def test_a_checkpoint_that_does_not_know_its_arguments_is_taken_as_it_is() -> None:
    found = resumed_metadata(parts({"lr": 0.1}), {}, sgd(lr=0.5))
    assert json.loads(found["optimizer"])["groups"] == [{"lr": 0.1}]


def test_where_a_replica_stood_in_the_rings_of_before_does_not_count_any_more() -> None:
    job = sgd(lr=0.1)
    kept = [{**part, "rings": '{"0": [3, 64]}', "applied": "[7]"} for part in parts({"lr": 0.1})]
    assert resumed_metadata(kept, trained_with(job), job) == resumed_metadata(
        parts({"lr": 0.1}), trained_with(job), job
    )

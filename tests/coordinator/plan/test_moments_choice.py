"""Moments in 8 bits: a job whose optimizer has none is refused before its model is captured; others get the setting."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from ravnest import Job, Pipeline
from ravnest.coordinator.plan.prepared_job import prepare, stage_settings, update_cost
from ravnest.errors import JobError
from tests.e2e.jobs import a_net, batches


def a_job(moments: str, optimizer: partial[torch.optim.Optimizer]) -> Job:
    return Job(
        model=a_net(),
        loss=F.cross_entropy,
        train_data=batches([8, 8]),
        optimizer=optimizer,
        pipeline=Pipeline(moments=moments),
    )


def test_an_optimizer_without_such_moments_is_refused_with_the_reason() -> None:
    job = a_job("8bit", partial(torch.optim.Adagrad, lr=0.1))
    with pytest.raises(JobError, match=r'pipeline.moments is "8bit": the moments of Adagrad have no 8-bit form'):
        prepare(job, 1, None, lambda phase: None)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(JobError, match=r"pipeline\.moments is '4bit': give one of float32, 8bit"):
        Pipeline(moments="4bit")


def test_stages_get_the_form_and_the_planner_its_size() -> None:
    adam = partial(torch.optim.Adam, lr=0.1)
    job = a_job("8bit", adam)
    assert stage_settings(job, 0, 2, 1).moments == "8bit"
    assert update_cost(a_job("float32", adam)).state_bytes_per_byte == pytest.approx(2.0)
    assert update_cost(job).state_bytes_per_byte == pytest.approx(0.508, abs=0.01)

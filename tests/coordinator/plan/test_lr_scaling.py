"""The learning rate of several clusters: scaled where that is known to help, told, and the user's to say."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from ravnest.coordinator.plan.lr_scaling import rate_factor, scaled_optimizer, scaled_schedule
from ravnest.job import Job
from ravnest.settings import Averaging
from ravnest.spec import OptimizerSpec, ScheduleSpec
from tests.e2e.jobs import a_job, batches


def job(optimizer: Any, **averaging: Any) -> Job:
    return replace(a_job(batches([8])), optimizer=optimizer, averaging=Averaging(**averaging))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
def test_adam_and_its_kin_learn_faster_with_more_clusters(kind: Any) -> None:
    waiting = job(partial(kind, lr=1e-3), blocking=True)
    assert [rate_factor(waiting, clusters).factor for clusters in (1, 2, 4)] == [1.0, math.sqrt(2), 2.0]
    assert "square root of 4 clusters" in rate_factor(waiting, 4).reason
    beside = job(partial(kind, lr=1e-3))
    assert rate_factor(beside, 4).factor == pytest.approx(math.sqrt(2)), "a late mean allows for less"


def test_other_optimizers_keep_their_rate_and_it_is_said_why() -> None:
    found = rate_factor(job(partial(torch.optim.SGD, lr=0.1)), 4)
    assert found.factor == 1.0 and "SGD" in found.reason


def test_what_a_job_says_counts_with_any_optimizer_and_number_of_clusters() -> None:
    assert rate_factor(job(partial(torch.optim.SGD, lr=0.1), rate_factor=3.0), 2).factor == 3.0
    assert rate_factor(job(partial(torch.optim.Adam, lr=0.1), rate_factor=1.0), 4).factor == 1.0


def test_the_rate_is_multiplied_where_it_is_given_and_where_it_is_the_optimizers_default() -> None:
    assert scaled_optimizer(OptimizerSpec("Adam", {"lr": 0.01, "eps": 1e-6}), 2.0).arguments == {
        "lr": 0.02,
        "eps": 1e-6,
    }
    assert scaled_optimizer(OptimizerSpec("AdamW", {}), 2.0).arguments == {"lr": 2e-3}


def test_rates_that_a_schedule_sets_itself_are_multiplied_too() -> None:
    spec = ScheduleSpec("OneCycleLR", {"max_lr": 0.1, "total_steps": 100, "pct_start": 0.3})
    found = scaled_schedule(spec, 2.0)
    assert found is not None and found.arguments == {"max_lr": 0.2, "total_steps": 100, "pct_start": 0.3}
    assert scaled_schedule(None, 2.0) is None

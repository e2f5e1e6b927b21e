"""What is done about staleness in a job: what it asks for, or the default; and nothing, with the reason, where that has
no meaning for its optimizer."""

from functools import partial

import pytest
import torch

from ravnest import Job, Pipeline
from ravnest.coordinator.planning import goal_of
from ravnest.coordinator.prepare import choose_correction, stage_settings
from ravnest.engine.corrections.correction import DEFAULT
from tests.e2e.jobs import a_net, batches


def a_job(optimizer: object, correction: str | None) -> Job:
    return Job(
        model=a_net(),
        loss=torch.nn.functional.cross_entropy,
        train_data=batches([8]),
        optimizer=optimizer,  # type: ignore[arg-type]
        pipeline=Pipeline(correction=correction),
    )


ADAM = partial(torch.optim.AdamW, lr=1e-3)
SGD = partial(torch.optim.SGD, lr=1e-3)


def test_a_job_that_asks_for_nothing_gets_the_default() -> None:
    job = a_job(ADAM, None)
    assert choose_correction(job) == (DEFAULT, f"staleness is corrected by {DEFAULT}, the default")
    assert stage_settings(job, 0, 2, 3).correction == DEFAULT
    assert goal_of(job, None, None).predicts, "its memory is planned for"


def test_a_job_gets_what_it_asks_for() -> None:
    job = a_job(ADAM, "discount")
    assert choose_correction(job) == ("discount", "staleness is corrected by discount, as asked for")
    assert not goal_of(job, None, None).predicts


def test_none_can_be_asked_for() -> None:
    assert choose_correction(a_job(ADAM, "none")) == ("none", "staleness is not corrected, as asked for")


@pytest.mark.parametrize(("asked", "words"), [(None, "the default"), ("predict", "asked for")])
def test_an_optimizer_that_cannot_be_corrected_is_told_of(asked: str | None, words: str) -> None:
    job = a_job(SGD, asked)
    name, reason = choose_correction(job)
    assert name == "none"
    assert reason == (
        f"staleness is not corrected: {asked or DEFAULT} was {words}, and SGD without momentum keeps no velocity to "
        "predict weights from"
    )
    assert stage_settings(job, 0, 2, 3).correction == "none" and not goal_of(job, None, None).predicts

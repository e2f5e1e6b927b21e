"""What is done about staleness in a job: what it asks for, or the default; and nothing, with the reason, where that has
no meaning for its optimizer."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from ravnest import Job, Pipeline
from ravnest.coordinator.plan.plan_run import goal_of
from ravnest.coordinator.plan.prepared_job import choose_correction, stage_settings
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


@pytest.mark.parametrize(
    ("batch_count", "epochs", "accumulate", "most", "clusters", "warm_up"),
    [
        (22, 20, 1, None, 1, 73),
        (22, 20, 1, None, 2, 36),
        (22, 20, 4, None, 1, 18),
        (250, 12, 1, None, 1, 500),
        (10_000, 12, 1, None, 1, 500),
        (10_000, 12, 1, 60, 1, 10),
        (1, 1, 1, None, 1, 1),
        (None, 20, 1, None, 1, 500),
        (None, 20, 1, 120, 1, 20),
    ],
)
def test_a_correction_is_careful_for_a_sixth_of_the_run_at_most(
    batch_count: int | None, epochs: int, accumulate: int, most: int | None, clusters: int, warm_up: int
) -> None:
    job = replace(
        a_job(ADAM, None),
        train_data=_Endless() if batch_count is None else batches([8] * batch_count),
        epochs=epochs,
        max_updates=most,
        pipeline=Pipeline(accumulate=accumulate),
    )
    assert stage_settings(job, 0, 2, 3, clusters=clusters).warm_up_updates == warm_up


class _Endless:
    """Data that does not tell how much of it there is."""

    def __iter__(self) -> Iterator[object]:
        return itertools.cycle(batches([8]))


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

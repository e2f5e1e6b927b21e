"""The state machine of a run: every phase can be reached, and the last ones are left by no other."""

import logging
from pathlib import Path
from typing import Any, cast

import pytest

from ravnest.coordinator.feed.ledger import Ledger
from ravnest.coordinator.report.phase import LAST, NEXT, Phase, may_follow
from ravnest.coordinator.report.progress import Progress
from ravnest.coordinator.run.context import RunContext
from ravnest.monitor.display import QuietDisplay
from ravnest.monitor.events import EventLog


def test_every_phase_can_be_reached_from_the_first() -> None:
    reached = {Phase.PREPARING}
    while more := {after for before in reached for after in NEXT[before]} - reached:
        reached |= more
    assert reached | {*LAST} == {*Phase}


def test_a_run_may_stop_in_every_phase_and_does_nothing_else_then() -> None:
    assert all(may_follow(phase, last) for phase in Phase for last in LAST)
    assert not any(may_follow(last, phase) for last in LAST for phase in Phase if phase not in LAST)


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    progress = Progress("job", 1, Ledger())
    events = EventLog(tmp_path / "events.jsonl")
    return RunContext(cast(Any, None), events, progress, cast(Any, None), QuietDisplay())


def test_a_step_is_shown_in_place_of_its_phase_until_it_ends(context: RunContext) -> None:
    context.enter(Phase.PREPARING)
    context.begin_step("capturing the model")
    assert context.progress.activity == "capturing the model"
    context.begin_step("")
    assert context.progress.activity == "preparing"


def test_what_a_stopping_run_still_does_is_a_step_of_that(context: RunContext) -> None:
    context.enter(Phase.STOPPING)
    context.enter_fed(Phase.SAVING)
    assert context.progress.phase is Phase.STOPPING and context.progress.activity == "saving"


def test_an_evaluation_that_ends_does_not_hide_a_redeployment(context: RunContext) -> None:
    context.progress.phase = Phase.TRAINING
    context.enter(Phase.REDEPLOYING)
    context.enter_fed(Phase.TRAINING)
    assert context.progress.phase is Phase.REDEPLOYING


@pytest.mark.usefixtures("impossible_phases_are_expected")
def test_a_phase_that_cannot_follow_is_logged_and_ends_no_run(
    context: RunContext, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        context.enter(Phase.TRAINING)
    assert context.progress.phase is Phase.TRAINING
    assert "which its state machine does not have" in caplog.text

"""The walk of the requester's thread through the data: it waits, goes back, and tells which phase the run is in."""

import asyncio

import pytest

from ravnest.coordinator.feed.evaluation_scores import Evaluation
from ravnest.coordinator.feed.ledger import DataPosition
from ravnest.coordinator.report.phase import Phase
from ravnest.coordinator.run.data_walk import DataRewindError, DataWalk

PLACE = DataPosition(microbatches=4, updates=4)


def test_a_rewind_ends_the_step_that_waits_and_the_next_one_goes_on() -> None:
    async def test() -> None:
        walk = DataWalk()
        waiting = asyncio.create_task(walk.step(asyncio.Event().wait()))
        await asyncio.sleep(0)
        assert walk.data_seconds is None
        walk.rewind(PLACE)
        with pytest.raises(DataRewindError) as back:
            await waiting
        assert back.value.place == PLACE
        assert await walk.step(asyncio.sleep(0, "done")) == "done"
        assert walk.data_seconds is not None

    asyncio.run(test())


def test_a_rewind_while_the_thread_is_busy_with_the_data_ends_its_next_step() -> None:
    async def test() -> None:
        walk = DataWalk()
        walk.rewind(PLACE)
        with pytest.raises(DataRewindError):
            await walk.step(asyncio.sleep(0))

    asyncio.run(test())


def test_a_cancelled_step_without_a_rewind_stays_cancelled() -> None:
    async def test() -> None:
        walk = DataWalk()
        waiting = asyncio.create_task(walk.step(asyncio.Event().wait()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(test())


def test_the_phase_follows_the_walk_also_after_a_rewind_from_the_end() -> None:
    walk = DataWalk()
    assert walk.phase is Phase.TRAINING and walk.is_undisturbed
    walk.evaluation = Evaluation()
    assert walk.phase is Phase.EVALUATING and not walk.is_undisturbed
    walk.rewind(PLACE)
    assert walk.phase is Phase.TRAINING and walk.is_undisturbed
    walk.is_finishing = True
    assert walk.phase is Phase.SAVING
    walk.rewind(PLACE)
    assert walk.phase is Phase.TRAINING
    walk.is_over = True
    assert walk.phase is Phase.SAVING

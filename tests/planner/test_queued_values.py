"""Values that wait at a stage are part of its planned memory."""

from dataclasses import replace

import numpy as np
import pytest

from ravnest.planner.cluster import SPARE, memory_bytes
from ravnest.planner.problem import Goal
from ravnest.planner.queued_values import queued_bytes
from ravnest.version_policy import POLICIES
from tests.planner.made_up import model

FED, TARGETS, CROSSING = 1000.0, 100.0, 1e5


def test_a_stem_holds_what_it_received_and_what_it_sent_of_every_microbatch_in_flight() -> None:
    queued = queued_bytes(model(12, crossing_bytes=CROSSING), 5)
    assert queued[3, 6] == 5 * 2 * CROSSING + 4 * CROSSING


def test_all_microbatches_may_wait_in_front_of_a_leaf() -> None:
    queued = queued_bytes(model(12, crossing_bytes=CROSSING), 5)
    assert queued[6, 12] == 5 * (TARGETS + CROSSING) + 2 * CROSSING


def test_a_model_in_one_piece_holds_its_batch() -> None:
    assert queued_bytes(model(12), 1)[0, 12] == FED + TARGETS


@pytest.mark.parametrize("versions", POLICIES)
def test_under_every_policy_a_value_of_the_size_of_a_weight_is_planned_for(versions: str) -> None:
    goal = Goal(max_clusters=1, versions=versions, accumulate=8)
    light, heavy = model(12, crossing_bytes=CROSSING), model(12, crossing_bytes=1.5e8)
    more = memory_bytes(heavy, goal, 4) - memory_bytes(light, goal, 4)
    further = 1.5e8 - CROSSING
    assert more[3, 4] == pytest.approx(SPARE * (4 * 2 + 4) * further)
    assert more[3, 12] == pytest.approx(SPARE * (4 + 2) * further)


def test_what_is_no_stage_holds_nothing() -> None:
    queued = queued_bytes(replace(model(12), forward_bytes=np.full(13, 1e9)), 40)
    assert not np.tril(queued).any()

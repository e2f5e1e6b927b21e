"""How old the states are from which a run could continue."""

import json
from pathlib import Path

import pytest

from ravnest.monitor.saved_state import saved_states_as_text
from ravnest.monitor.summary import SavedState, StateSummary, Summary


def text(updates: int, checkpoint: SavedState | None, replica: SavedState | None) -> str:
    state = StateSummary(checkpoint=checkpoint, replica=replica)
    return saved_states_as_text(Summary(status="running", reason="", updates=updates, state=state), now=1000.0)


@pytest.mark.parametrize(
    ("updates", "checkpoint", "replica", "expected"),
    [
        (0, None, None, ""),
        (5, None, None, "there is no checkpoint yet"),
        (5, None, SavedState(updates=4, at=997.0), "there is no checkpoint yet; the providers hold a state that is 1 "),
        (400, SavedState(updates=400, at=1.0), None, "the newest checkpoint has all 400 updates"),
        (400, SavedState(updates=60, at=630.0), None, "the newest checkpoint is 340 updates, 6:10 old"),
    ],
)
def test_the_age_is_told_in_updates_and_time(
    updates: int, checkpoint: SavedState | None, replica: SavedState | None, expected: str
) -> None:
    assert text(updates, checkpoint, replica).startswith(expected)


def test_what_the_providers_hold_is_told_only_if_it_is_newer() -> None:
    checkpoint, newer = SavedState(updates=60, at=630.0), SavedState(updates=388, at=980.0)
    both = "the newest checkpoint is 340 updates, 6:10 old; the providers hold a state that is 12 updates, 20 s old"
    assert text(400, checkpoint, newer) == both
    assert ";" not in text(400, checkpoint, SavedState(updates=60, at=630.0))


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = StateSummary(checkpoint=SavedState(updates=3, at=7.5))
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(Summary(status="running", reason="", state=state).to_json()))
    assert Summary.read(path).state == state

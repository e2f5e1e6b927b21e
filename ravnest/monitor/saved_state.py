"""Age of the states from which a run could continue, as text for the user."""

from ravnest.monitor.summary import SavedState, Summary
from ravnest.units import counted, duration


def saved_states_as_text(summary: Summary, now: float) -> str:
    """Like "the newest checkpoint is 340 updates, 6:10 old; the providers hold a state that is 12 updates, 20 s old".

    `now` is in seconds since 1970. Empty when nothing was trained.
    """
    if not summary.updates:
        return ""
    checkpoint, replica = summary.state.checkpoint, summary.state.replica
    if checkpoint is None:
        text = "there is no checkpoint yet"
    elif summary.updates <= checkpoint.updates:
        return f"the newest checkpoint has all {counted(checkpoint.updates, 'update')}"
    else:
        text = f"the newest checkpoint is {_age(checkpoint, summary.updates, now)}"
    if replica is not None and (checkpoint is None or replica.updates > checkpoint.updates):
        text += f"; the providers hold a state that is {_age(replica, summary.updates, now)}"
    return text


def _age(state: SavedState, updates: int, now: float) -> str:
    behind = max(0, updates - state.updates)
    age = f"{duration(max(0.0, now - state.at))} old"
    return f"{counted(behind, 'update')}, {age}" if behind else age

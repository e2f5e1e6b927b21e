"""State machine of a run: its phases, and which phase may follow which.

`docs/architecture.md` draws the table `NEXT`, and a test compares the two.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final


class Phase(Enum):
    """The current work of a run. The value is the text that a user reads."""

    PREPARING = "preparing"
    """The requester's thread captures and profiles the model. No provider is needed yet."""
    GATHERING = "waiting for providers"
    """Too few providers are connected, at first or after some were lost."""
    RESUMING = "resuming the running stages"
    """A restarted coordinator looks for stages that kept running, and for replicas that survived."""
    PLANNING = "planning"
    DEPLOYING = "deploying stages"
    TRAINING = "training"
    AVERAGING = "averaging"
    """A round runs with nothing in flight."""
    EVALUATING = "evaluating"
    SAVING = "saving"
    """All of the data has been fed, and the last checkpoint is written."""
    REDEPLOYING = "redeploying"
    """The run is planned and deployed again."""
    STOPPING = "stopping"
    """The run was interrupted, or the requester's data failed, and the run saves what it can."""
    CHECKING = "checking the model that was written"


DEPLOYED: Final = (Phase.TRAINING, Phase.AVERAGING, Phase.EVALUATING, Phase.SAVING)
"""The phases of a deployed run; a lost stage, a newcomer or the end of the data can end each."""

NEXT: Final[Mapping[Phase, frozenset[Phase]]] = {
    Phase.PREPARING: frozenset({Phase.GATHERING}),
    Phase.GATHERING: frozenset({Phase.RESUMING, Phase.PLANNING, Phase.DEPLOYING}),
    Phase.RESUMING: frozenset({Phase.PLANNING, Phase.TRAINING}),
    Phase.PLANNING: frozenset({Phase.GATHERING, Phase.DEPLOYING}),
    Phase.DEPLOYING: frozenset({Phase.GATHERING, Phase.PLANNING, Phase.TRAINING, Phase.EVALUATING, Phase.SAVING}),
    Phase.TRAINING: frozenset({Phase.AVERAGING, Phase.EVALUATING, Phase.SAVING, Phase.REDEPLOYING}),
    Phase.AVERAGING: frozenset({Phase.TRAINING, Phase.EVALUATING, Phase.SAVING, Phase.REDEPLOYING}),
    Phase.EVALUATING: frozenset({Phase.TRAINING, Phase.AVERAGING, Phase.SAVING, Phase.REDEPLOYING}),
    Phase.SAVING: frozenset({Phase.AVERAGING, Phase.REDEPLOYING}),
    Phase.REDEPLOYING: frozenset({Phase.GATHERING, Phase.DEPLOYING}),
    Phase.STOPPING: frozenset(),
    Phase.CHECKING: frozenset(),
}
"""By phase, the phases that may follow it. `LAST` is left out: its phases may follow every phase."""

LAST: Final = (Phase.STOPPING, Phase.CHECKING)
"""Phases after which no other is shown: whatever the swarm still does is a step of them."""


def may_follow(before: Phase, after: Phase) -> bool:
    """Whether a run may go from one phase to another, or stay in it."""
    return after is before or after in LAST or after in NEXT[before]

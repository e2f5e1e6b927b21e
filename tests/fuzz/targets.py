"""All decoders of foreign bytes, each as one function of bytes, with valid inputs as seeds.

The property tests and the long runs of `make fuzz` share them. Add a new decoder to one of the tables.
"""

from tests.fuzz import (
    codec_targets,
    message_targets,
    peer_targets,
    plan_targets,
    ring_targets,
    run_targets,
    stage_targets,
)
from tests.fuzz.rule import Target, bombs, judge

__all__ = ["TARGETS", "Target", "bombs", "judge", "named"]

TARGETS = (
    *message_targets.TARGETS,
    *peer_targets.TARGETS,
    *stage_targets.TARGETS,
    *run_targets.TARGETS,
    *plan_targets.TARGETS,
    *codec_targets.TARGETS,
    *ring_targets.TARGETS,
)


def named(name: str) -> Target:
    (found,) = (target for target in TARGETS if target.name == name)
    return found

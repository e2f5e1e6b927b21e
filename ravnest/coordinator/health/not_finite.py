"""Which stage values that are not finite arose in, from what the stages of a cluster say.

It is the user's own mathematics or data, or a provider that sends what it did not compute. A pure function, which gives
its reason as text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_FINITE: Final = "finite"
_BAD: Final = ("infinite", "nan")


@dataclass(frozen=True, slots=True)
class StageWord:
    """What one stage says of the microbatch; `provider` alone where it said nothing."""

    provider: str
    received: str = ""
    sent: str = ""
    kind: str = ""
    where: str = ""
    gradients_received: str = ""
    gradients_sent: str = ""
    steep: str = ""


@dataclass(frozen=True, slots=True)
class Ruling:
    """What is to be done about it."""

    accused: str
    """The provider that sent what it says it did not compute; empty where there is none."""
    accuser: str
    """Who got that."""
    reason: str


def judge_not_finite(words: Sequence[StageWord], complaint: int) -> Ruling:
    """The words of the stages from root to leaf; the stage of the number `complaint` found a loss or a gradient that is
    not finite."""
    for number, word in enumerate(words):
        before = words[number - 1] if number else None
        if before is not None and word.received in _BAD and before.sent == _FINITE:
            reason = (
                f"{before.provider} sent values that are not finite for stage {number}, and computed finite ones as it "
                "says itself"
            )
            return Ruling(before.provider, word.provider, reason)
        if before is not None and word.received == "nan" and not before.sent:
            reason = (
                f"{before.provider} sent values that are not finite for stage {number}, and does not say how it came to"
            )
            return Ruling(before.provider, word.provider, reason)
        if word.where and word.received != "nan":
            return Ruling("", "", f"it arose in stage {number} ({word.provider}): {word.where}")
    # All was well on the way forward, as far as is known: it is the gradients.
    for number in range(len(words) - 1, complaint, -1):
        word, before = words[number], words[number - 1]
        if word.gradients_sent in _BAD and word.gradients_received not in _BAD:
            return Ruling("", "", f"the gradients became so in stage {number} ({word.provider}): {_steep(word.steep)}")
        if before.gradients_received in _BAD and word.gradients_sent == _FINITE:
            reason = (
                f"{word.provider} sent gradients that are not finite to stage {number - 1}, and computed finite ones "
                "as it says itself"
            )
            return Ruling(word.provider, before.provider, reason)
    silent = ", ".join(word.provider for word in words if not word.sent and not word.gradients_sent)
    unknown = f"; {silent} could not say" if silent else ""
    return Ruling("", "", f"no stage could say where it arose{unknown}: lower the learning rate or check the data")


def _steep(operators: str) -> str:
    advice = "lower the learning rate or set pipeline.clip_norm"
    if not operators:
        return f"the values have grown too large; {advice}"
    edge = f"an operator such as {operators} has no finite gradient where its value is 0"
    return f"{edge}; keep it away from there, or {advice}"

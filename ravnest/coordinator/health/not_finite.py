"""Origin of values that are not finite, found from the statements of a cluster's stages.

The cause is the user's own mathematics or data, or a provider that sends other values than it computed. A pure function
that gives its reason as text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_FINITE: Final = "finite"
_BAD: Final = ("infinite", "nan")
_CLAIMS_FINITE: Final = "says that it computed finite ones"


@dataclass(frozen=True, slots=True)
class StageWord:
    """Statement of one stage about the microbatch; only `provider` is set where it made none."""

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
    """Result of the search."""

    accused: str
    """The provider that sent other values than it states; empty for none."""
    accuser: str
    """The provider that received them."""
    reason: str


def judge_not_finite(words: Sequence[StageWord], complaint: int) -> Ruling:
    """Finds the origin from the statements of the stages, root first. Stage number `complaint` found a loss or a
    gradient that is not finite."""
    # If no forward value is known to be at fault, a gradient is.
    found = _judge_forward(words) or _judge_backward(words, complaint)
    if found is not None:
        return found
    silent = ", ".join(word.provider for word in words if not word.sent and not word.gradients_sent)
    unknown = f"; {silent} could not say" if silent else ""
    return Ruling("", "", f"no stage could say where it arose{unknown}: lower the learning rate or check the data")


def _judge_forward(words: Sequence[StageWord]) -> Ruling | None:
    root, leaf = words[0], words[-1]
    if root.received in _BAD and len(words) > 1:
        # A root receives nothing but rows that the leaf has looked up for it.
        if leaf.kind == "parameter" and leaf.where:
            return Ruling("", "", f"it arose in stage {len(words) - 1} ({leaf.provider}): {leaf.where}")
        return _accuse(leaf, root, "values that are not finite to stage 0", "does not say why")
    for number, word in enumerate(words):
        before = words[number - 1] if number else None
        if before is not None and word.received in _BAD and before.sent == _FINITE:
            return _accuse(before, word, f"values that are not finite to stage {number}", _CLAIMS_FINITE)
        if before is not None and word.received == "nan" and not before.sent:
            return _accuse(before, word, f"values that are not finite to stage {number}", "does not say why")
        if word.where and word.received != "nan":
            return Ruling("", "", f"it arose in stage {number} ({word.provider}): {word.where}")
    return None


def _judge_backward(words: Sequence[StageWord], complaint: int) -> Ruling | None:
    # A leaf that complains of gradients got them from the root, which comes after it in the way of these.
    for number in range(len(words) - 1, complaint if complaint < len(words) - 1 else -1, -1):
        word, before = words[number], words[number - 1]
        if word.gradients_sent in _BAD and word.gradients_received not in _BAD:
            where = f"stage {number} ({word.provider})"
            return Ruling("", "", f"the gradients became not finite in {where}: {_steep(word.steep)}")
        if before.gradients_received in _BAD and word.gradients_sent == _FINITE:
            return _accuse(
                word, before, f"gradients that are not finite to stage {(number - 1) % len(words)}", _CLAIMS_FINITE
            )
    return None


def _accuse(sender: StageWord, receiver: StageWord, sent: str, claim: str) -> Ruling:
    return Ruling(sender.provider, receiver.provider, f"{sender.provider} sent {sent}, and {claim}")


def _steep(operators: str) -> str:
    advice = "lower the learning rate or set pipeline.clip_norm"
    if not operators:
        return f"the values have grown too large; {advice}"
    edge = f"an operator such as {operators} has no finite gradient at 0"
    return f"{edge}; keep its argument away from 0, or {advice}"

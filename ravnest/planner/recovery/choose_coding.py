"""Coding of replicas on the line from the owner of a stage to the holder: as exact as the line allows."""

from dataclasses import dataclass
from typing import Final

from ravnest.state.codings import EXACT, INT8, LOSSLESS
from ravnest.state_budget import BUDGET_SHARE
from ravnest.units import byte_size, duration

PLAIN_SECONDS: Final = 20.0
"""A part that takes no longer than this within its share is sent as it is: coding would cost more than it saves."""

LOSSLESS_SECONDS: Final = 60.0
"""A part that takes no longer than this within its share is coded bit for bit: a lost machine then costs little, and
nothing is rounded."""


SENT_SHARE: Final = {EXACT: 1.0, LOSSLESS: 0.79, INT8: 0.30}
"""Bytes that a line carries for each byte of a part (`python -m benchmarks.coded_state`, the larger of two models).
The first part has no reference: in int8 it takes 0.47."""


@dataclass(frozen=True, slots=True)
class CodingChoice:
    """A coding of `ravnest.state.codings`, and why."""

    coding: str
    reason: str


def choose_coding(
    part_bytes: float, line_bytes_per_second: float | None, *, is_exact: bool, is_local: bool
) -> CodingChoice:
    """The coding of parts of this size on this line (None: not measured). `is_exact`: the user wants no rounded state.
    `is_local`: the line is within one machine."""
    if is_local:
        return CodingChoice(EXACT, "all providers are on one machine")
    if line_bytes_per_second is None or not line_bytes_per_second > 0:
        return CodingChoice(LOSSLESS, "the line is not measured")
    seconds = part_bytes / (BUDGET_SHARE * line_bytes_per_second)
    sending = f"{byte_size(part_bytes)} take {duration(seconds)} with {BUDGET_SHARE:.0%} of the line"
    if seconds <= PLAIN_SECONDS:
        return CodingChoice(EXACT, sending)
    if is_exact:
        return CodingChoice(LOSSLESS, f"{sending}, and checkpoint.exact is set")
    return CodingChoice(LOSSLESS if seconds <= LOSSLESS_SECONDS else INT8, sending)

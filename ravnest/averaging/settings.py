"""Averaging settings that travel from a job to the owners of its rings, as plain data."""

import json
import math
from dataclasses import asdict, dataclass

from ravnest.errors import GraphError
from ravnest.safe_json import read_json


@dataclass(frozen=True, kw_only=True)
class RingSettings:
    """The settings that all owners of all rings of a run share."""

    outer: str = "mean"
    outer_rate: float | None = None
    outer_momentum: float | None = None
    codec: str = "float32"
    optimizer_state: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "RingSettings":
        """The settings from JSON. GraphError for anything that `to_json` cannot have written; an unknown name fails
        later, when it is used."""
        try:
            data = read_json(text)
        except ValueError as error:
            raise GraphError(f"the settings of averaging are not valid JSON: {error}") from None
        if not isinstance(data, dict) or set(data) != set(cls.__dataclass_fields__):
            raise GraphError(
                "the settings of averaging do not have the fields this version knows; update the older machine"
            )
        numbers = [data["outer_rate"], data["outer_momentum"]]
        plain = isinstance(data["outer"], str) and isinstance(data["codec"], str)
        if not plain or not isinstance(data["optimizer_state"], bool) or not all(map(_is_number, numbers)):
            raise GraphError("the settings of averaging have values they cannot have")
        return cls(**data)


def _is_number(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

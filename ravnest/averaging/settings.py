"""Averaging settings that travel from a job to the owners of its rings, as plain data."""

import json
from dataclasses import asdict, dataclass

from ravnest.errors import GraphError
from ravnest.safe_json import read_fields


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
            return cls(**read_fields(cls, text))
        except ValueError as error:
            raise GraphError(f"the settings of averaging {error}") from None

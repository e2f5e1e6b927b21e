"""How a stage trains: the part of a job that travels to its provider, as plain data."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from ravnest.errors import GraphError
from ravnest.plain_json import read_json
from ravnest.spec import OptimizerSpec, ScheduleSpec


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """Everything a stage needs besides its graph and weights; `from_json` refuses what is not exactly that."""

    optimizer: str
    """An OptimizerSpec as JSON."""
    schedule: str | None = None
    """A ScheduleSpec as JSON, stepped once per update."""
    stage: int = 0
    stages: int = 1
    seed: int = 0
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    in_flight: int = 1
    record_updates: bool = False

    def optimizer_spec(self) -> OptimizerSpec:
        return OptimizerSpec.from_json(self.optimizer)

    def schedule_spec(self) -> ScheduleSpec | None:
        return None if self.schedule is None else ScheduleSpec.from_json(self.schedule)

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "StageSettings":
        try:
            data: Any = read_json(text)
        except ValueError as error:
            raise GraphError(f"the stage's settings are not valid JSON: {error}") from None
        fields = cls.__dataclass_fields__
        if not isinstance(data, dict) or set(data) != set(fields):
            raise GraphError("the stage's settings do not have the fields this version knows; update the older machine")
        for name, kinds in _KINDS.items():
            if not isinstance(data[name], kinds) or (isinstance(data[name], bool) and bool not in kinds):
                raise GraphError(f"the stage's setting {name} is {str(data[name])[:80]!r}, which it cannot be")
        if not 0 <= data["stage"] < data["stages"] or min(data["accumulate"], data["in_flight"]) < 1:
            raise GraphError("the stage's settings contradict one another (stage, stages, accumulate, in_flight)")
        return cls(**data)


_KINDS: dict[str, tuple[type, ...]] = {
    "optimizer": (str,),
    "schedule": (str, type(None)),
    "stage": (int,),
    "stages": (int,),
    "seed": (int,),
    "accumulate": (int,),
    "clip_norm": (int, float, type(None)),
    "clip_value": (int, float, type(None)),
    "in_flight": (int,),
    "record_updates": (bool,),
}

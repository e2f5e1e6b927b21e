"""Settings of a stage's training: the part of a job that travels to the provider, as plain data."""

import json
from dataclasses import asdict, dataclass

from ravnest.engine.corrections.discount import WARM_UP_UPDATES
from ravnest.errors import GraphError
from ravnest.safe_json import read_fields
from ravnest.settings import CORRECTIONS, MOMENTS, PRECISIONS, VERSION_POLICIES
from ravnest.spec import OptimizerSpec, ScheduleSpec
from ravnest.version_policy import DEFAULT_POLICY, POLICIES


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """Everything that a stage needs besides its graph and weights. `from_json` raises GraphError for anything else."""

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
    """Initial limit of microbatches in flight; the coordinator may change it later."""
    max_in_flight: int | None = None
    """Upper bound of that limit, at every stage; None: no bound."""
    max_staleness: int | None = None
    """Maximum number of updates between a microbatch's forward and its backward; None: no maximum."""
    versions: str = DEFAULT_POLICY
    correction: str = "none"
    warm_up_updates: int = WARM_UP_UPDATES
    """Number of updates over which the discount of the learning rate ends (corrections/discount.py)."""
    precision: str = "float32"
    moments: str = "float32"
    """Form of the optimizer's moments in memory between updates."""
    compiled: bool = False
    split_backward: bool = False
    trace: int = 0
    """Number of microbatches to trace."""
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
            data = read_fields(cls, text)
        except ValueError as error:
            raise GraphError(f"the stage's settings {error}") from None
        if not 0 <= data["stage"] < data["stages"] or min(data["accumulate"], data["in_flight"]) < 1:
            raise GraphError("the stage's settings contradict one another (stage, stages, accumulate, in_flight)")
        for name, known in _NAMES.items():
            if data[name] not in known:
                raise GraphError(f"the stage's setting {name} is {data[name][:80]!r}, which this version does not know")
        minima = {"max_in_flight": 1, "max_staleness": 0, "warm_up_updates": 1, "trace": 0}
        for name, number in minima.items():
            if data[name] is not None and data[name] < number:
                raise GraphError(f"the stage's setting {name} is {data[name]}, and cannot be below {number}")
        if POLICIES[data["versions"]].within_accumulate and data["in_flight"] > data["accumulate"]:
            raise GraphError("the stage's settings contradict one another (versions, in_flight, accumulate)")
        return cls(**data)


_NAMES: dict[str, tuple[str, ...]] = {
    "versions": VERSION_POLICIES,
    "correction": CORRECTIONS,
    "precision": PRECISIONS,
    "moments": MOMENTS,
}

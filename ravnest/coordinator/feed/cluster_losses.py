"""Losses of one cluster: its stages without a provider, and the providers that were lost with them."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LostStage:
    """A stage that no provider holds any more. Times are of the clock `time.monotonic`."""

    node: str
    """The provider that held it, or that was to take it."""
    reason: str
    last_well_at: float
    """When the provider was last well."""
    noticed_at: float
    before: "LostStage | None" = None
    """The earlier loss of the same stage, when this provider was lost before it could take the stage."""

    @property
    def chain(self) -> "list[LostStage]":
        """This loss and the earlier ones of the same stage."""
        return [self, *(self.before.chain if self.before is not None else ())]


@dataclass
class ClusterLosses:
    """The losses since the cluster was last complete."""

    stages: dict[int, LostStage] = field(default_factory=dict)
    """Stages without a provider, by number."""
    gone: set[str] = field(default_factory=set)
    """Providers that were lost since the last rebuild of the cluster began."""
    returned: set[str] = field(default_factory=set)
    """Providers that were lost with their stage, and have joined again before another took it."""
    unfit: set[tuple[str, int]] = field(default_factory=set)
    """Providers with a stage that failed there. They are not given the same stage again."""

    def note(self, stage: int, node: str, reason: str, last_well_at: float, noticed_at: float) -> None:
        """This stage has no provider any more."""
        self.stages[stage] = LostStage(node, reason, last_well_at, noticed_at, self.stages.get(stage))

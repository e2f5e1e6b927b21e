"""What a run's formations work with: one object for all of them, and for whoever forms, mends and watches them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.feed.ledger import DataPosition, Ledger
from ravnest.coordinator.report.progress import Progress
from ravnest.coordinator.report.recorder import Recorder
from ravnest.coordinator.run.context import Course
from ravnest.coordinator.swarm.swarm import Swarm


@dataclass
class Surroundings:
    """What a formation works with, and what outlives it."""

    course: Course
    swarm: Swarm
    ledger: Ledger
    recorder: Recorder
    progress: Progress
    say: Callable[[str], None]
    threads: int
    """What each provider computes with that does not choose itself."""
    lacking: Callable[[ClusterRun], Sequence[str]]
    """Who of a cluster is gone, or has failed."""
    overdue: Callable[[str, str], None]
    """This provider is not waited for any longer, for this reason."""
    placed: Callable[[str, int, DataPosition, Sequence[int]], None] = field(
        default=lambda key, number, place, starts: None
    )
    """Remembers where the data stands at a replica: of which stages, its number, the place, and where stages begin."""

"""What the user is told of replicas and checkpoints, and when it is told again."""

from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.coordinator.replicas.outlook import StateOutlook
from ravnest.coordinator.replicas.tracker import ReplicaTracker
from ravnest.planner.recovery.state_periods import StatePeriods
from tests.builders import cluster_plan, stage_plan


class Bench:
    """Two stages, a and b, whose uplinks are set by hand."""

    def __init__(self) -> None:
        self.rates: dict[str, float | None] = {"a": 1e6, "b": 1e6}
        self.told: list[StatePeriods] = []
        self.cluster = ClusterRun(cluster_plan(tuple(stage_plan(name, k) for k, name in enumerate("ab")), in_flight=2))
        replicas = ReplicaTracker(lambda *_, **__: None, lambda: None, lambda node: self.rates[node])
        replicas.set_holders(self.cluster, ("k-0", "k-1"), {0: "b", 1: "a"})
        self.outlook = StateOutlook(replicas, self.told.append, 60.0, 1e9)

    def look(self) -> None:
        self.outlook.look([self.cluster])


def test_what_a_loss_costs_is_told_once_and_again_when_it_changes() -> None:
    bench = Bench()
    bench.rates["b"] = 10.0
    bench.look()
    bench.look()
    (told,) = bench.told
    assert told.sentences()[0].startswith("a lost machine costs at most ")
    assert told.at_most_lost_seconds > told.replica_seconds > 2.0
    bench.rates["b"] = 9.0
    bench.look()
    assert len(bench.told) == 1, "a period that changed by a tenth is not told again"
    bench.rates["b"] = 5.0
    bench.look()
    assert len(bench.told) == 2


def test_without_a_cluster_nothing_is_told() -> None:
    bench = Bench()
    assert bench.outlook.look([]) is None
    assert bench.told == []


def test_lines_that_were_not_measured_limit_nothing() -> None:
    bench = Bench()
    bench.rates = {"a": None, "b": None}
    bench.look()
    assert bench.told[0].replica_seconds == 2.0 and bench.told[0].checkpoint_seconds == 60.0

"""How much a cluster is fed ahead: so that it does not wait for the coordinator, and goes on for a while without it."""

import pytest

from ravnest.coordinator.plan.feed_ahead import feed_ahead
from ravnest.planner.cluster import Cluster, StageCost
from ravnest.planner.problem import Provider


def ahead(seconds: float, fed_bytes: float, latency_seconds: float) -> int:
    """Of a cluster of one stage that takes so long for a microbatch of so many bytes."""
    stage = StageCost("a", 0, 1, seconds, 0.0, 0.0, 0.0, seconds, 1e6, 1e6, fed_bytes, 0.0)
    provider = Provider(name="a", memory_bytes=1 << 40, down_bytes_per_second=1e9, latency_seconds=latency_seconds)
    return feed_ahead(Cluster((stage,), 1, 16), {"a": provider})


@pytest.mark.parametrize(
    ("seconds", "fed_bytes", "latency_seconds", "expected"),
    [
        pytest.param(0.1, 1e3, 0.01, 22, id="for two seconds"),
        pytest.param(4.0, 1e3, 0.01, 3, id="slow ones are few in two seconds"),
        pytest.param(0.001, 1e3, 0.001, 34, id="no more than may wait at a stage"),
        pytest.param(0.1, 4e6, 0.01, 5, id="large ones are few"),
        pytest.param(0.1, 1e3, 0.0, 3, id="on this machine it ends with its coordinator"),
        pytest.param(0.1, 1e9, 1.0, 32, id="as many as a slow line needs"),
    ],
)
def test_so_many_are_fed_ahead(seconds: float, fed_bytes: float, latency_seconds: float, expected: int) -> None:
    assert ahead(seconds, fed_bytes, latency_seconds) == expected

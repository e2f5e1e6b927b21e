"""The requester's line: what it feeds and receives counts, and a plan that it limits says so."""

from dataclasses import replace

from ravnest.planner.problem import Goal, Network, Requester
from ravnest.planner.shared_limits import RESULT_BYTES, totals
from tests.planner.made_up import cut_at, machine, named
from tests.planner.search.preference.profiles import Part, profile

ALONE = Goal(max_clusters=1)
COSTS = profile([Part(0.03, 2e7, 1e6, 1e5, 0)] * 4)


def limited(requester: Requester, **host: str) -> tuple[float, str]:
    """Samples per second and the limit of two machines behind this requester's line."""
    network = Network({}, requester)
    providers = {
        name: replace(provider, **host) for name, provider in named(*(machine(n, mbps=1000) for n in "ab")).items()
    }
    found = totals(ALONE, network, providers, cut_at(COSTS, ALONE, network, providers, ("ab", (2,))).clusters)
    return found.samples_per_second, found.limit


def test_the_uplink_limits_and_says_how_many_samples_a_second() -> None:
    fed = sum(COSTS.input_bytes)
    rate, limit = limited(Requester(up_bytes_per_second=2 * fed))
    assert abs(rate / COSTS.samples - 2) < 1e-9
    assert limit.startswith("the requester's uplink: ") and "a sample" in limit and "Mbit/s" in limit
    assert limit.endswith(f"{rate:.3g} samples/s")


def test_results_come_over_the_downlink() -> None:
    rate, limit = limited(Requester(down_bytes_per_second=2 * RESULT_BYTES))
    assert abs(rate / COSTS.samples - 1) < 1e-9
    assert limit.startswith("the requester's downlink: ")


def test_machines_at_the_requesters_place_do_not_use_its_line() -> None:
    slow = Requester("home", up_bytes_per_second=1.0, down_bytes_per_second=1.0)
    assert limited(slow, host="home")[1] != limited(slow)[1]
    assert not limited(slow, host="home")[1].startswith("the requester's")

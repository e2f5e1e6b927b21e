"""Any machine may vanish at any moment: real swarms in the WAN lab keep their promises under injected faults.

Every case of the lists below runs once, in an order that the seed determines. After each case training continues and
the events report it; at the end the ledger adds up, the clusters agree and the loss is that of a run without faults. A
failure names the case and the seed; `python -m tests.chaos --seed N --only CASE` repeats it. `make chaos MINUTES=30`
runs many more cases. tests/e2e_swarm/test_vanishing.py has four of them without slow lines: a machine that joins,
leaves or stops, and a coordinator that is lost, while nothing else happens.
"""

import pytest

from benchmarks.homes_parts.population import FIVE
from tests.chaos.chaos import run_chaos
from tests.chaos.schedule import cases
from tests.wan.needs import need_lab

pytestmark = pytest.mark.timeout(900)

SEED = 7

ONE_CLUSTER = cases(
    "cut stem",
    "one-way cut root",
    "loss stem",
    "slow line leaf",
    "kill root + kill leaf",
    "kill leaf during checkpoint",
    "kill stem during evaluation",
    "kill standby during deployment",
)

TWO_CLUSTERS = cases(
    "kill leaf during round",
    "partition root",
    "stop leaf during round",
    "kill coordinator during round",
    "kill root + kill root",
)

HOME_LINES = cases(
    "kill root",
    "cut leaf",
    "kill leaf during checkpoint",
    "kill coordinator",
    "leave stem",
)


def test_one_cluster_with_spare_machines_survives_every_fault() -> None:
    need_lab()
    report = run_chaos(None, SEED, among=ONE_CLUSTER, clusters=1, stages=3, standbys=2, undisturbed_seconds=2.0)
    assert not report.violations, f"\n{report}"
    assert len(report.outcomes) == len(ONE_CLUSTER)


def test_two_clusters_survive_faults_in_their_rounds_and_agree() -> None:
    need_lab()
    report = run_chaos(None, SEED, among=TWO_CLUSTERS, clusters=2, stages=2, standbys=1, undisturbed_seconds=2.0)
    assert not report.violations, f"\n{report}"
    assert len(report.outcomes) == len(TWO_CLUSTERS)


def test_a_swarm_on_home_lines_survives_every_fault() -> None:
    """Uplinks of 10 to 50 Mbit/s, three machines behind NAT, and two of them 120 ms away from the others."""
    need_lab()
    report = run_chaos(
        None, SEED, among=HOME_LINES, clusters=1, stages=3, standbys=2, lines=FIVE, undisturbed_seconds=2.0
    )
    assert not report.violations, f"\n{report}"
    assert len(report.outcomes) == len(HOME_LINES)

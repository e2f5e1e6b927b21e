"""A wide-area network on one machine: hosts with home lines, delay, loss, cuts and NATs. See docs/wan-lab.md."""

from tests.wan.lab import Lab, LabHost, LabPath, RunningLab
from tests.wan.namespaces import LabError
from tests.wan.network import HostCounters, PathCounters
from tests.wan.topology import Host, Path, Topology, read_topology

__all__ = [
    "Host",
    "HostCounters",
    "Lab",
    "LabError",
    "LabHost",
    "LabPath",
    "Path",
    "PathCounters",
    "RunningLab",
    "Topology",
    "read_topology",
]

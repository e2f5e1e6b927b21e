"""Target for the input of `ravnest plan`: a nodes.toml from another person."""

from pathlib import Path

from ravnest.preview.nodes_file import read_nodes
from tests.fuzz.rule import Target

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "nodes.toml"

_EVERY_KEY = b"""\
[requester]
up_mbps = 40
down_mbps = 100
gflops = 95
memory_gbs = 20
host = "tower"
[[node]]
name = "anna"
memory = "16GB"
speed = 1.5
up_mbps = 10
down_mbps = 50
ping_ms = 30
reachable = false
reliability = 0.98
device = "cpu"
host = "tower"
cores = 8
threads = 4
[[node]]
name = "office"
count = 3
memory = "8GB"
gflops = 95
memory_gbs = 20
[[link]]
between = ["anna", "office"]
mbps = 900
ping_ms = 0.5
[[link]]
from = "anna"
to = "office-2"
mbps = 90
"""

_INLINE = b"""\
node = [{ name = "a", memory = "1GB" }, { name = "b", memory = "2GB", "speed" = 0.5 }]
link = [
  { between = ["a", 'b'], ping_ms = 3 }, # both ways
]
requester.up_mbps = 3
"""


def _nodes(data: bytes) -> None:
    found = read_nodes(data)
    found.providers(50e9, 10e9)
    dict(found.devices)


TARGETS = (Target("nodes_file", _nodes, lambda: [_EXAMPLE.read_bytes(), _EVERY_KEY, _INLINE]),)

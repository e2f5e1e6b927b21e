"""A nodes.toml is read as intended, and an error names the line and the fix for every mistake in it."""

import math
import time
from pathlib import Path

import pytest

from ravnest.errors import PlanError
from ravnest.planner.problem import Line, Provider, Requester
from ravnest.preview.nodes_file import (
    LINK_KEYS,
    MAX_BYTES,
    MAX_NODES,
    NODE_KEYS,
    REQUESTER_KEYS,
    NodesFile,
    read_nodes,
)

ROOT = Path(__file__).resolve().parents[2]

GOOD = """\
# two machines and an office
[requester]
up_mbps = 40
gflops = 50

[[node]]
name = "anna"
memory = "16GB"
speed = 2
reachable = false

[[node]]
name = "office"
count = 3
device = "6 cores"
memory = "8GiB"
gflops = 25
up_mbps = 10
down_mbps = 80
ping_ms = 30
reliability = 0.9

[[link]]
between = ["office"]
mbps = 1000
"""


def refusal(text: str | bytes) -> str:
    with pytest.raises(PlanError) as refused:
        read_nodes(text, "nodes.toml")
    return str(refused.value)


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new, 1)


def test_figures_come_out_in_bytes_and_seconds_with_speeds_relative_to_this_machine() -> None:
    anna, office, *others = read_nodes(GOOD).providers(0.0, 0.0)
    assert anna == Provider(name="anna", memory_bytes=16 * 10**9, compute_speed=2, memory_speed=2, reachable=False)
    assert office == Provider(
        name="office-1",
        memory_bytes=8 << 30,
        compute_speed=0.5,
        memory_speed=0.5,
        up_bytes_per_second=1.25e6,
        down_bytes_per_second=10e6,
        latency_seconds=0.015,
        reliability=0.9,
    )
    assert [other.name for other in others] == ["office-2", "office-3"]


def test_a_figure_is_held_against_what_was_measured_unless_the_file_says_it() -> None:
    text = changed("gflops = 50\n", "").replace("gflops = 25", "gflops = 25\nmemory_gbs = 40")
    office = read_nodes(text).providers(100e9, 10e9)[1]
    assert (office.compute_speed, office.memory_speed) == (0.25, 4.0)
    said = read_nodes(text.replace("[requester]", "[requester]\ngflops = 25\nmemory_gbs = 20")).providers(100e9, 10e9)
    assert (said[1].compute_speed, said[1].memory_speed) == (1.0, 2.0)


def test_a_speed_against_this_machine_is_one_in_the_precision_of_the_job() -> None:
    anna, office, *_ = read_nodes(changed("gflops = 50\n", "")).providers(100e9, 10e9, 4.0)
    assert (anna.compute_speed, anna.memory_speed) == (8.0, 2.0)
    # Figures are what `ravnest doctor` shows there for it.
    assert office.compute_speed == 0.25


def test_a_figure_without_anything_to_hold_it_against_is_refused() -> None:
    with pytest.raises(PlanError, match="office-1 gives gflops"):
        read_nodes(changed("gflops = 50\n", "")).providers(0.0, 0.0)


def test_a_link_of_a_name_with_a_count_joins_every_two_of_its_machines_both_ways() -> None:
    network = read_nodes(GOOD).network
    assert network.requester == Requester("", 5e6, math.inf)
    assert len(network.measured) == 6
    # The link gives no ping, so it is the sum of both machines' own latencies.
    assert set(network.measured.values()) == {Line(125e6, 0.03)}


def test_a_link_from_one_to_another_is_one_way() -> None:
    nodes = read_nodes(changed('between = ["office"]', 'from = "anna"\nto = "office-2"\nping_ms = 8'))
    assert nodes.network.measured == {("anna", "office-2"): Line(125e6, 0.004)}


def test_a_link_between_several_joins_every_two_of_them() -> None:
    nodes = read_nodes(changed('between = ["office"]', 'between = ["anna", "office-1", "office-3"]'))
    assert len(nodes.network.measured) == 6


def test_machines_on_one_host_say_its_cores_and_the_requester_may_be_there() -> None:
    text = changed("speed = 2", 'host = "tower"\ncores = 16\nthreads = 8').replace("up_mbps = 40", 'host = "tower"')
    nodes = read_nodes(text)
    anna = nodes.nodes[0].provider
    assert (anna.host, anna.cores, anna.threads) == ("tower", 16, 8)
    assert nodes.network.requester.host == "tower"


def test_the_example_has_twelve_unequal_machines() -> None:
    nodes = read_nodes((ROOT / "examples" / "nodes.toml").read_bytes())
    providers = nodes.providers(50e9, 10e9)
    assert len(providers) == 12
    assert len({provider.compute_speed for provider in providers}) >= 9
    assert nodes.devices["gaming-pc"] == "RTX 3060"


def test_windows_line_ends_and_a_byte_order_mark_are_no_mistake() -> None:
    dos = b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode()
    assert read_nodes(dos) == read_nodes(GOOD)
    assert refusal(dos.replace(b"speed = 2", b"speed = -2")).startswith("nodes.toml:9: ")


MISTAKES = [
    ('memory = "16GB"', "memory = 16", 8, 'is 16 without a unit: write it as memory = "16GB"'),
    ('memory = "16GB"', 'memory = "16XB"', 8, 'is "16XB", which is not a size: write it as memory = "8GB"'),
    ('memory = "16GB"', 'memory = "9000000TB"', 8, "more than any machine has"),
    ('memory = "16GB"\n', "", 6, 'anna has no memory: say how much memory it lends, as in memory = "8GB"'),
    ('name = "anna"\n', "", 6, "the 1st node has no name"),
    ('name = "anna"', "name = 5", 7, "is 5, which is not text"),
    ('name = "anna"', 'name = " "', 7, "give text of 1 to 64 printable characters"),
    ('name = "anna"', 'name = "a\\u001b[2J"', 7, "printable characters"),
    ('name = "anna"', 'name = "office"', 13, "there are two nodes called office: give each its own name"),
    ('name = "anna"', 'name = "office-2"', 13, "there are two nodes called office-2"),
    ("speed = 2", "speed = -2", 9, "speed of anna is -2: give a number above 0"),
    ("speed = 2", "speed = nan", 9, "speed of anna is nan"),
    ("speed = 2", "speed = true", 9, "speed of anna is true: give a number"),
    ("speed = 2", 'speed = "2"', 9, "without quotes"),
    ("speed = 2", "sped = 2", 9, '"sped" in anna is not known: did you mean speed?'),
    ("speed = 2", "latency_ms = 2", 9, "did you mean ping_ms?"),
    ("speed = 2", "colour = 2", 9, "the keys are name, memory, speed"),
    ("speed = 2", "speed = 2\ngflops = 3", 10, "anna has both speed and gflops"),
    ("speed = 2", "memory_gbs = 3", 9, "anna has memory_gbs and no gflops"),
    ("speed = 2", 'host = "tower"', 9, "anna has host and no cores"),
    ("reachable = false", 'reachable = "no"', 10, "write reachable = true or reachable = false"),
    ("count = 3", "count = 0", 14, "count of office is 0: give a whole number from 1 to 100,000"),
    ("count = 3", "count = 2.5", 14, "give a whole number"),
    ("count = 3", f"count = {MAX_NODES}", 14, "more than 100,000 machines"),
    ("gflops = 25", "gflops = 0x" + "f" * 9000, 17, "gflops of office is a huge number"),
    ("gflops = 25", "gflops = " + "9" * 9000, 17, "too many digits"),
    ("ping_ms = 30", "ping_ms = [30]", 20, "ping_ms of office is a list"),
    ("reliability = 0.9", "reliability = 98", 21, "give a number from 1e-06 to 1"),
    ('["office"]', '["offce"]', 24, 'there is no node called "offce": did you mean office?'),
    ('["office"]', '["anna"]', 24, "joins a node with itself: name two nodes"),
    ('["office"]', '"office"', 24, 'is not a list of names: write it as between = ["anna", "ben"]'),
    (
        'between = ["office"]',
        'from = "anna"',
        23,
        'does not say which nodes it joins: give between = ["a", "b"], or from and to',
    ),
    ('between = ["office"]', 'between = ["office"]\nto = "anna"', 24, "has between together with from or to"),
    ("mbps = 1000", "", 23, "has neither mbps nor ping_ms: give one or both"),
    ("up_mbps = 40", 'host = "ana"', 3, 'there is no node or host called "ana": did you mean anna?'),
    ("up_mbps = 40", "up_mbs = 40", 3, "did you mean up_mbps?"),
    ("[[link]]", "[[lnk]]", 23, '"lnk" in the file is not known: did you mean link?'),
    ("[[link]]", "[link]", 23, "[link] has single brackets: write [[link]]"),
    ("[requester]", "[[requester]]", 2, "write [requester] once, on a line of its own"),
    ("[[node]]", "[node]", 12, "an earlier table of this name has single brackets, use double brackets"),
]


@pytest.mark.parametrize(("old", "new", "line", "told"), MISTAKES, ids=[f"{m[1][:30]}" for m in MISTAKES])
def test_a_mistake_is_told_with_its_line_and_its_fix(old: str, new: str, line: int, told: str) -> None:
    sentence = refusal(changed(old, new))
    assert sentence.startswith(f"nodes.toml:{line}:"), sentence
    assert told in sentence, sentence


BROKEN = [
    ('name = "anna"', "name = anna", "nodes.toml:7:8: ", "put text into quotes"),
    ('name = "anna"', 'name = "anna', "nodes.toml:7:13: ", "close the quotes"),
    ("speed = 2", "speed 2", "nodes.toml:9:7: ", "each line is key = value"),
    ("speed = 2", "speed = 2\nspeed = 3", "nodes.toml:10:10: ", "given twice"),
    ("speed = 2", "speed = 2GB", "nodes.toml:9:10: ", "put text into quotes"),
]


@pytest.mark.parametrize(("old", "new", "place", "fix"), BROKEN, ids=[b[1] for b in BROKEN])
def test_what_is_not_toml_is_told_with_line_and_column(old: str, new: str, place: str, fix: str) -> None:
    sentence = refusal(changed(old, new))
    assert sentence.startswith(f"{place}this is not TOML, "), sentence
    assert fix in sentence, sentence


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing yet\n", "[requester]\nup_mbps = 4\n"])
def test_a_file_without_a_machine_is_told_how_to_begin(text: str) -> None:
    assert refusal(text) == 'nodes.toml names no machine: write [[node]], and below it name = "anna" and memory = "8GB"'


def test_rubbish_is_told_to_be_no_text() -> None:
    assert refusal(b"[[node]]\n\xff\xfe\x00") == (
        "nodes.toml:2: this is not text in UTF-8: save the file as plain text in UTF-8"
    )


def test_two_that_only_the_requester_joins_have_no_line_of_their_own() -> None:
    text = changed("reliability = 0.9", "reachable = false")
    assert "office-1 and office-2 are both reachable = false" in refusal(text)


def test_two_counts_of_cores_for_one_host_are_refused() -> None:
    text = changed("speed = 2", 'host = "tower"\ncores = 16').replace("ping_ms = 30", 'host = "tower"\ncores = 8')
    assert refusal(text).startswith("nodes.toml:22: tower has 8 cores here and 16 in line 10")


def test_too_much_is_refused_before_it_is_read() -> None:
    started = time.monotonic()
    assert "larger than 8 MiB" in refusal("#" * (MAX_BYTES + 1))
    assert "more than 200,000 pairs" in refusal(changed("count = 3", "count = 90000"))
    assert "nested too deeply" in refusal("a = " + "[" * 50_000)
    assert time.monotonic() - started < 5


def test_a_hundred_thousand_machines_can_be_read() -> None:
    text = f'[[node]]\nname = "pc"\nmemory = "4GB"\ncount = {MAX_NODES}\n'
    assert len(read_nodes(text).providers(1.0, 1.0)) == MAX_NODES


def test_reading_needs_nothing_heavy() -> None:
    """So that a mistake in the file is told before torch is imported."""
    import subprocess
    import sys

    program = (
        "import sys; from ravnest.preview.nodes_file import read_nodes; "
        "assert not {'torch', 'numpy', 'grpc', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize("key", [*NODE_KEYS, *LINK_KEYS, *REQUESTER_KEYS])
def test_every_key_is_explained_in_the_docs(key: str) -> None:
    assert f"| `{key}` |" in (ROOT / "docs" / "planning.md").read_text()


def test_what_was_read_is_a_value() -> None:
    assert isinstance(read_nodes(GOOD), NodesFile)
    assert read_nodes(GOOD) == read_nodes(GOOD.encode())


ODDLY_WRITTEN = '''\
# [[node]] in a comment """ counts as nothing
"requester".gflops = 50  # one
[[node]]
device = """
[[node]]
name = "not a machine"
"""
"name" = 'anna'
memory = "8GB"
[[node]] # the second
name = "ben"
memory = 8
'''


def test_the_line_is_right_next_to_comments_quoted_keys_and_strings_of_several_lines() -> None:
    assert refusal(ODDLY_WRITTEN.replace("8GB", "8 apples")).startswith("nodes.toml:9: memory of anna")
    plain = ODDLY_WRITTEN.replace('"""\n[[node]]\nname = "not a machine"\n"""', '"a\\"b"')
    assert refusal(plain).startswith("nodes.toml:9: memory of ben")
    assert refusal(plain.replace("= 8\n", '= "8GB"\n').replace("= 50", "= -5")).startswith("nodes.toml:2: gflops")


def test_a_mistake_in_an_inline_table_is_told_at_the_key_that_holds_the_table() -> None:
    text = 'node = [\n  { name = "a", memory = "1GB" },\n  { name = "b", memory = 2 },\n]\n'
    assert refusal(text).startswith("nodes.toml:1: memory of b is 2 without a unit")

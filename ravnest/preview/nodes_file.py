"""Reader of nodes.toml, the file that describes machines and their links for `ravnest plan`.

The result depends on the text alone; docs/planning.md describes the format. A mistake in the file is a PlanError that
names the file, the line and the fix.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ravnest.errors import PlanError
from ravnest.planner.problem import NO_LIMIT, Line, Network, Pair, Provider, Requester
from ravnest.planner.reliability import NEVER_SEEN, estimate_reliability
from ravnest.preview.nodes_table import SourceText, Table, nearest, quoted

MAX_BYTES: Final = 8 << 20
MAX_NODES: Final = 100_000
MAX_PAIRS: Final = 200_000
"""Maximum number of pairs of machines that [[link]] tables may join, each direction counted."""

NODE_KEYS: Final = (
    *("name", "memory", "speed", "gflops", "memory_gbs", "up_mbps", "down_mbps", "ping_ms", "reachable"),
    *("reliability", "device", "host", "cores", "threads", "count"),
)
LINK_KEYS: Final = ("between", "from", "to", "mbps", "ping_ms")
REQUESTER_KEYS: Final = ("up_mbps", "down_mbps", "gflops", "memory_gbs", "host")
UNSEEN: Final = estimate_reliability(NEVER_SEEN).value
"""Reliability of a node of which the file says none: the prior that a run has too."""
_TABLES: Final = ("node", "link", "requester")

BYTES_PER_MEGABIT: Final = 1e6 / 8


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """One machine. Its speed is relative to this machine (`provider.compute_speed`), or given in absolute figures."""

    provider: Provider
    device: str = ""
    """A description for the reader of the plan, such as "RTX 3060"."""
    flops_per_second: float | None = None
    memory_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class NodesFile:
    """The machines, links and requester of a nodes.toml."""

    nodes: tuple[NodeEntry, ...]
    network: Network
    reference_flops_per_second: float | None = None
    """Speed of the machine that measures the model; None if the file does not give it."""
    reference_memory_bytes_per_second: float | None = None

    @property
    def devices(self) -> Mapping[str, str]:
        """The description of each machine by its name, for machines that have one."""
        return {node.provider.name: node.device for node in self.nodes if node.device}

    def providers(
        self, flops_per_second: float, memory_bytes_per_second: float, precision_speed: float = 1.0
    ) -> tuple[Provider, ...]:
        """The machines with their speeds relative to the machine that measured the model.

        `flops_per_second` and `memory_bytes_per_second` are the speeds of that machine, 0 if unknown; the file may give
        other ones, which then count. A node's relative `speed` is multiplied by `precision_speed`: how many times as
        fast the machine computes in the job's precision as in float32. PlanError if a node gives absolute figures and
        the speed to compare them with is unknown.
        """
        flops = self.reference_flops_per_second or flops_per_second
        moved = self.reference_memory_bytes_per_second or memory_bytes_per_second
        found = []
        for node in self.nodes:
            provider = node.provider
            provider = replace(provider, compute_speed=provider.compute_speed * precision_speed)
            if node.flops_per_second is not None:
                if not flops:
                    raise PlanError(
                        f"{provider.name} gives gflops, but the gflops of this machine are unknown: set gflops in "
                        "[requester], or give each node a speed instead"
                    )
                speed = node.flops_per_second / flops
                provider = replace(provider, compute_speed=speed, memory_speed=speed)
            if node.memory_bytes_per_second is not None and moved:
                provider = replace(provider, memory_speed=node.memory_bytes_per_second / moved)
            found.append(provider)
        return tuple(found)


def read_nodes(text: str | bytes, source: str = "nodes.toml") -> NodesFile:
    """Read a nodes.toml. A mistake is a PlanError with `source`, the line and the fix."""
    if len(text) > MAX_BYTES:
        raise PlanError(
            f"{source} is larger than {MAX_BYTES >> 20} MiB: write equal machines once, with count = NUMBER"
        )
    plain = _decoded(text, source)
    values = _parsed(plain, source)
    top = Table(values, (), SourceText(source, plain), "the file")
    top.check_keys(_TABLES, "the tables are [[node]], [[link]] and [requester]")
    nodes, groups = _nodes(top)
    requester, figures = _requester(top, nodes)
    network = Network({}, requester)
    measured = _links(top, nodes, groups, network)
    return NodesFile(tuple(nodes.values()), replace(network, measured=measured), *figures)


def _decoded(text: str | bytes, source: str) -> str:
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise PlanError(f"{source}:{line}: this is not text in UTF-8: save the file as plain text in UTF-8") from None


def _parsed(text: str, source: str) -> dict[str, Any]:
    try:
        # tomllib converts the line ends in the same way, so the columns in its errors are those of this text.
        return tomllib.loads(text.replace("\r\n", "\n"))
    except RecursionError:
        raise PlanError(f"{source} is nested too deeply to be read: write one [[node]] for each machine") from None
    except ValueError as error:
        raise PlanError(_not_toml(str(error), text, source)) from None


_FIXES: Final = (
    ("Invalid value", 'put text into quotes, as in name = "anna", and write numbers plainly, as in 12.5'),
    ("Cannot overwrite", "it is given twice in one table, remove one of them"),
    ("twice", "remove one of the two; write [[node]], in double brackets, before each machine"),
    ("Expected '='", "each line is key = value, and comments begin with #"),
    ("Expected newline", "write one key = value on a line, and put text into quotes"),
    ("Expected ']", "close the brackets, as in [[node]]"),
    ("Invalid initial character for a key", "each line is key = value, and comments begin with #"),
    ("Unterminated string", "close the quotes on the same line"),
    ("Illegal character", "remove the character if it is not plain text, or close the quotes before it"),
    ("Unclosed array", "close it with ]"),
)


def _not_toml(said: str, text: str, source: str) -> str:
    at = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", said)
    if at is None:
        # Python itself refuses to convert a number with so long a row of digits; this error has no position.
        digits = re.search(r"[\d_]{4000}", text)
        line = text.count("\n", 0, digits.start()) + 1 if digits else 1
        return f"{source}:{line}: this number has too many digits: write numbers plainly, as in 12.5"
    reason = said[: at.start()]
    line, column = (int(at[1]), int(at[2])) if at[1] else (text.rstrip("\n").count("\n") + 1, 0)
    place = f"{source}:{line}:{column}" if column else f"{source}:{line}"
    fix = next((fix for words, fix in _FIXES if words in reason), "docs/planning.md shows the format")
    if "Cannot overwrite" in reason and text.split("\n")[line - 1].lstrip().startswith("[["):
        fix = "an earlier table of this name has single brackets, use double brackets, as in [[node]]"
    return f"{place}: this is not TOML, {reason[:1].lower()}{reason[1:][:200]}: {fix}"


def _nodes(top: Table) -> tuple[dict[str, NodeEntry], dict[str, tuple[str, ...]]]:
    """The machines by name, and the names of the machines that each entry stands for, by the entry's name."""
    nodes: dict[str, NodeEntry] = {}
    groups: dict[str, tuple[str, ...]] = {}
    lines: dict[str, Table] = {}
    entries = top.tables("node")
    if not entries:
        raise PlanError(
            f'{top.source.name} names no machine: write [[node]], and below it name = "anna" and memory = "8GB"'
        )
    for number, entry in enumerate(entries, start=1):
        entry.title = f"the {_ordinal(number)} node"
        name = entry.text("name")
        entry.title = name
        count = entry.whole("count", minimum=1, maximum=MAX_NODES, default=1)
        if len(nodes) + count > MAX_NODES:
            entry.fail("count", f"with these the file has more than {MAX_NODES:,} machines: reduce the count")
        node = _node(entry, name)
        names = (name,) if count == 1 else tuple(f"{name}-{i}" for i in range(1, count + 1))
        if name in groups:
            entry.fail("name", f"there are two nodes called {name}: give each its own name, or one of them count = 2")
        for each in names:
            if each in nodes:
                entry.fail("name", f"there are two nodes called {each}: give each its own name")
            nodes[each] = replace(node, provider=replace(node.provider, name=each))
        groups[name] = names
        _same_cores(entry, node.provider, lines)
    return nodes, groups


def _node(entry: Table, name: str) -> NodeEntry:
    entry.check_keys(NODE_KEYS)
    if entry.has("speed") and (entry.has("gflops") or entry.has("memory_gbs")):
        other = "gflops" if entry.has("gflops") else "memory_gbs"
        entry.fail(
            other, f"{name} has both speed and {other}: keep either speed or the figures that ravnest doctor shows"
        )
    if entry.has("memory_gbs") and not entry.has("gflops"):
        entry.fail("memory_gbs", f"{name} has memory_gbs and no gflops: give both, as ravnest doctor shows them")
    if entry.has("host") != entry.has("cores"):
        given, lacking = ("host", "cores") if entry.has("host") else ("cores", "host")
        entry.fail(
            given, f"{name} has {given} and no {lacking}: give both, for machines that share the cores of one host"
        )
    speed = entry.number("speed", minimum=1e-6, maximum=1e6, default=1.0)
    gflops = entry.number("gflops", minimum=1e-3, maximum=1e9, default=None)
    memory_gbs = entry.number("memory_gbs", minimum=1e-3, maximum=1e7, default=None)
    cores = entry.whole("cores", minimum=1, maximum=4096, default=1)
    provider = Provider(
        name=name,
        memory_bytes=entry.size("memory"),
        compute_speed=speed,
        memory_speed=speed,
        up_bytes_per_second=_rate(entry, "up_mbps"),
        down_bytes_per_second=_rate(entry, "down_mbps"),
        latency_seconds=_one_way(entry) or 0.0,
        reachable=entry.flag("reachable", default=True),
        reliability=entry.number("reliability", minimum=1e-6, maximum=1.0, default=UNSEEN),
        host=entry.text("host", default=""),
        cores=cores,
        threads=entry.whole("threads", minimum=1, maximum=4096, default=1),
    )
    return NodeEntry(
        provider,
        entry.text("device", default=""),
        None if gflops is None else gflops * 1e9,
        None if memory_gbs is None else memory_gbs * 1e9,
    )


def _same_cores(entry: Table, provider: Provider, first_of_host: dict[str, Table]) -> None:
    if not provider.host:
        return
    first = first_of_host.setdefault(provider.host, entry)
    cores = first.whole("cores", minimum=1, maximum=4096, default=1)
    if provider.cores != cores:
        entry.fail(
            "cores",
            f"{provider.host} has {provider.cores} cores here and {cores} in line {first.line('cores')}: "
            "give the same number, of the whole host",
        )


def _requester(top: Table, nodes: Mapping[str, NodeEntry]) -> tuple[Requester, tuple[float | None, float | None]]:
    entry = top.table("requester")
    entry.title = "the requester"
    entry.check_keys(REQUESTER_KEYS)
    host = entry.text("host", default="")
    machines = {node.provider.machine for node in nodes.values()} if host else set()
    if host and host not in machines:
        entry.fail("host", f"there is no node or host called {quoted(host)}: {nearest(host, machines)}")
    gflops = entry.number("gflops", minimum=1e-3, maximum=1e9, default=None)
    memory_gbs = entry.number("memory_gbs", minimum=1e-3, maximum=1e7, default=None)
    figures = (None if gflops is None else gflops * 1e9, None if memory_gbs is None else memory_gbs * 1e9)
    return Requester(host, _rate(entry, "up_mbps"), _rate(entry, "down_mbps")), figures


def _links(
    top: Table, nodes: Mapping[str, NodeEntry], groups: Mapping[str, tuple[str, ...]], network: Network
) -> dict[Pair, Line]:
    measured: dict[Pair, Line] = {}
    for number, entry in enumerate(top.tables("link"), start=1):
        entry.title = f"the {_ordinal(number)} link"
        entry.check_keys(LINK_KEYS)
        if not entry.has("mbps") and not entry.has("ping_ms"):
            entry.fail("", f"{entry.title} has neither mbps nor ping_ms: give one or both")
        rate = _rate(entry, "mbps", default=None)
        one_way = _one_way(entry)
        for pair in _pairs(entry, nodes, groups, len(measured)):
            # A value that the link leaves out follows from the two machines, as without the link.
            sender, receiver = (nodes[name].provider for name in pair)
            if network.relayed(sender, receiver):
                entry.fail(
                    "",
                    f"{pair[0]} and {pair[1]} are both reachable = false, so their traffic goes through the "
                    "requester: make one of them reachable, or remove the link",
                )
            known = network.line(sender, receiver)
            measured[pair] = Line(
                known.bytes_per_second if rate is None else rate,
                known.latency_seconds if one_way is None else one_way,
            )
    return measured


def _pairs(
    entry: Table, nodes: Mapping[str, NodeEntry], groups: Mapping[str, tuple[str, ...]], before: int
) -> list[Pair]:
    """Sender and receiver of each direction of the link. A name with a count stands for all of its machines."""

    def named(key: str, names: Sequence[str]) -> list[str]:
        found: list[str] = []
        for name in names:
            members = groups.get(name) or ((name,) if name in nodes else None)
            if members is None:
                entry.fail(key, f"there is no node called {quoted(name)}: {nearest(name, groups)}")
            found += members
        return found

    both = entry.has("between")
    if both and (entry.has("from") or entry.has("to")):
        entry.fail(
            "between",
            f"{entry.title} has between together with from or to: use between for both directions, from and to for one",
        )
    if both:
        senders = receivers = named("between", entry.texts("between"))
    else:
        if not (entry.has("from") and entry.has("to")):
            entry.fail(
                "", f'{entry.title} does not say which nodes it joins: give between = ["a", "b"], or from and to'
            )
        senders, receivers = named("from", [entry.text("from")]), named("to", [entry.text("to")])
    if before + len(senders) * len(receivers) > MAX_PAIRS + len(senders):
        entry.fail(
            "between", f"the links join more than {MAX_PAIRS:,} pairs: give the nodes up_mbps and down_mbps instead"
        )
    pairs = [(a, b) for a in senders for b in receivers if a != b]
    if not pairs:
        entry.fail("between" if both else "from", f"{entry.title} joins a node with itself: name two nodes")
    return pairs


def _rate(entry: Table, key: str, default: float | None = NO_LIMIT) -> Any:
    megabits = entry.number(key, minimum=1e-3, maximum=1e7, default=None)
    return default if megabits is None else megabits * BYTES_PER_MEGABIT


def _one_way(entry: Table) -> float | None:
    ping = entry.number("ping_ms", minimum=0.0, maximum=60_000.0, default=None)
    return None if ping is None else ping / 2000


def _ordinal(number: int) -> str:
    suffix = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"

"""Averaging: how fast rings average, against gloo, hivemind and the bound of the links, and whether they slow training.

On loopback 4 members average 100 MB, in alternating runs with gloo's `all_reduce`, both without encryption; a further
row has TLS, which the product always uses. In the WAN lab 4 hosts with links of 100 Mbit/s do the same with every
codec: Ravnest with TLS, gloo over the hosts' interfaces, and hivemind if `--hivemind` names an interpreter that has it.
`of bound` is the share of 2(C-1)/C x bytes / rate: float32 over links that are full in both directions all the time.
`processor seconds` are those of all members. The last part is a training run of two clusters, with a round every 20
updates of each cluster and without rounds.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.averaging_parts.contenders import Contender, Members, Site, Took
from benchmarks.averaging_parts.nodes import make_nodes
from benchmarks.averaging_parts.training import Training, trained
from benchmarks.report import Row, Target, finish, say
from tests.wan import Host, Lab
from tests.wan import Path as LabPath

_MEMBERS = 4
_PAUSES = (0.0, 0.5, 1.0, 2.0)
"""Seconds before a turn over links, one value for each repetition."""
_LOOPBACK_BYTES = 100_000_000
_LINE_MBPS = 100.0
_CODECS = ("float32", "lossless", "float16", "bfloat16", "int8", "int4")
_LOOPBACK_TARGET = 0.6
_LOOPBACK_AIM = 1.0
_BOUND_TARGET = 0.9
_INT8_TARGET = 3.5
_TRAINING_TARGET = 0.95
_PARTS = ("loopback", "lines", "training")


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of each contender by its name, and the reason for its last failure, if any."""

    took: Mapping[str, Sequence[Took]]
    failures: Mapping[str, str]


def main() -> int:
    given = _arguments()
    rows: list[Row] = []
    targets: list[Target] = []
    for name, part in zip(_PARTS, (_loopback, _lines, _training), strict=True):
        if name in given.only:
            more_rows, more_targets = part(given)
            rows += more_rows
            targets += more_targets
    return finish("averaging", given, rows, targets)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.averaging", description="How fast rings average.")
    parser.add_argument("--quick", action="store_true", help="fewer cases, within a minute")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the result to this file")
    parser.add_argument("--record", action="store_true", help="also write the table to benchmarks/history/")
    parser.add_argument("--hivemind", metavar="PYTHON", help="an interpreter that can import hivemind")
    parser.add_argument("--only", choices=_PARTS, action="append", help="run only this part; may be repeated")
    given = parser.parse_args()
    given.only = given.only or _PARTS
    return given


def _loopback(given: argparse.Namespace) -> tuple[list[Row], list[Target]]:
    """100 MB between processes of one machine, which shows the cost of our own code."""
    contenders = [_gloo("lo"), _ours("float32", "plaintext"), _ours("float32", "tls")]
    if given.hivemind and not given.quick:
        contenders.append(_hivemind(given.hivemind))
    case = f"loopback, {_LOOPBACK_BYTES // 10**6} MB"
    sites = [Site("127.0.0.1")] * _MEMBERS
    measured = _measured(case, contenders, sites, _LOOPBACK_BYTES, 5 if given.quick else 15)
    gloo, plain = measured.took["gloo"], measured.took["ravnest float32, plaintext"]
    # The ratio of pairs that ran one after the other, so that a busy machine slows both.
    ratio = statistics.median(theirs.seconds / ours.seconds for theirs, ours in zip(gloo, plain, strict=True))
    rows: list[Row] = [_row(case, name, measured) for name in measured.took]
    aimed = "reached" if ratio >= _LOOPBACK_AIM else "not reached"
    say(f"{case}: {ratio:.2f} of gloo's speed, both without encryption (the aim of {_LOOPBACK_AIM:g} is {aimed})")
    return rows, [Target(f"{case}: of gloo's speed, without encryption", ratio, _LOOPBACK_TARGET)]


def _lines(given: argparse.Namespace) -> tuple[list[Row], list[Target]]:
    """Links of 100 Mbit/s: the share of their rate that is used, and the gain of codecs."""
    if reason := Lab.unavailable():
        say(f"the lines are left out: {reason}")
        return [], []
    rows: list[Row] = []
    targets: list[Target] = []
    cases = [(25, 50.0, 1)] if given.quick else [(25, 50.0, 5), (25, 20.0, 3), (100, 50.0, 2), (100, 20.0, 2)]
    for megabytes, round_trip_ms, repetitions in cases:
        more_rows, more_targets = _line_case(given, megabytes, round_trip_ms, repetitions)
        rows += more_rows
        targets += more_targets
    return rows, targets


def _line_case(
    given: argparse.Namespace, megabytes: int, round_trip_ms: float, repetitions: int
) -> tuple[list[Row], list[Target]]:
    case = f"{_LINE_MBPS:g} Mbit/s, {round_trip_ms:g} ms, {megabytes} MB"
    codecs = ("float32", "lossless", "int8") if given.quick else _CODECS
    contenders = [_gloo("eth0"), *(_ours(codec, "tls") for codec in codecs)]
    if given.hivemind and not given.quick:
        contenders.append(_hivemind(given.hivemind))
    hosts = [Host(f"m{index}", up_mbps=_LINE_MBPS, down_mbps=_LINE_MBPS) for index in range(_MEMBERS)]
    with Lab(hosts, default=LabPath(delay_ms=round_trip_ms / 2)) as lab:
        sites = [Site(lab.host(host.name).address, lab.host(host.name).command) for host in hosts]
        measured = _measured(case, contenders, sites, megabytes * 10**6, repetitions, pauses=True)
    bound = 2 * (_MEMBERS - 1) / _MEMBERS * megabytes * 8 / _LINE_MBPS
    rows: list[Row] = [
        {**_row(case, name, measured), "of_bound": bound / _seconds(took) if took else None}
        for name, took in measured.took.items()
    ]
    gloo, whole, coded = (_seconds(measured.took[name]) for name in ("gloo", "ravnest float32", "ravnest int8"))
    return rows, [
        Target(f"{case}: of the ring bound", bound / whole, _BOUND_TARGET),
        Target(f"{case}: of gloo's speed", gloo / whole, 1.0),
        Target(f"{case}: int8, times as fast as float32", whole / coded, _INT8_TARGET),
    ]


def _training(given: argparse.Namespace) -> tuple[list[Row], list[Target]]:
    """The same run with and without rounds."""
    if reason := "--quick" if given.quick else Lab.unavailable():
        say(f"the training run is left out: {reason}")
        return [], []
    training = Training()
    pairs = [(trained(training, averaging=False), trained(training, averaging=True)) for _ in range(3)]
    ratio = statistics.median(many.samples_per_second / none.samples_per_second for none, many in pairs)
    case = f"training, {training.clusters} clusters of {training.stages}, {training.line_mbps:g} Mbit/s"
    rows: list[Row] = [
        {
            "case": f"{case}, {words}",
            "samples_per_second": statistics.median(run.samples_per_second for run in runs),
            "rounds": runs[0].rounds,
            "seconds": statistics.median(run.round_seconds for run in runs),
        }
        for words, runs in (
            ("the last round alone", [none for none, _ in pairs]),
            (f"a round every {training.updates} updates", [many for _, many in pairs]),
        )
    ]
    return rows, [Target(f"{case}: samples/s of a run without averaging", ratio, _TRAINING_TARGET)]


def _measured(
    case: str,
    contenders: Iterable[Contender],
    sites: Sequence[Site],
    size_bytes: int,
    repetitions: int,
    pauses: bool = False,
) -> Measured:
    """Each contender averages once as a warm-up, which opens its connections, and then the contenders take turns. No
    turn begins before the others have prepared their next one: gloo's members copy their vectors, which costs as much
    as averaging. The pauses between turns differ: BBR pauses for 0.2 s every ten seconds of a connection's life, and a
    turn every ten seconds would always meet that pause at the same place, or never."""
    took: dict[str, list[Took]] = {}
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        all_members = []
        for contender in contenders:
            members = Members(contender, sites, size_bytes // 4, {**os.environ, "OMP_NUM_THREADS": "1"})
            all_members.append(stack.enter_context(members))
            took[contender.name] = []
        for number in range(repetitions + 1):
            for members in all_members:
                for each in all_members:
                    each.wait_until_ready()
                time.sleep(_PAUSES[number % len(_PAUSES)] if pauses else 0.0)
                result = None if members.has_given_up else members.average()
                name = members.contender.name
                if result is None:
                    failures[name] = members.failure
                elif number:
                    took[name].append(result)
                    say(f"{case}, {number} of {repetitions}: {name} {result.seconds:.3f} s")
    return Measured(took, failures)


def _row(case: str, name: str, measured: Measured) -> dict[str, object]:
    took = measured.took[name]
    if not took:
        return {"case": f"{case}: {name} ({measured.failures[name]})"}
    return {
        "case": f"{case}: {name}",
        "seconds": _seconds(took),
        "min_seconds": min(one.seconds for one in took),
        "of_gloo_speed": _seconds(measured.took["gloo"]) / _seconds(took),
        # hivemind computes in processes of its own, whose processor time is unknown.
        "processor_seconds": None if name == "hivemind" else statistics.median(one.processor_seconds for one in took),
    }


def _seconds(took: Sequence[Took]) -> float:
    return statistics.median(one.seconds for one in took)


def _ours(codec: str, security: str) -> Contender:
    words = f"{codec}, plaintext" if security == "plaintext" else codec
    return Contender(f"ravnest {words}", "ring_member", f"{codec},{security}", make_folder=make_nodes)


def _gloo(interface: str) -> Contender:
    return Contender("gloo", "gloo_member", interface)


def _hivemind(interpreter: str) -> Contender:
    return Contender("hivemind", "hivemind_member", interpreter=interpreter)


if __name__ == "__main__":
    sys.exit(main())

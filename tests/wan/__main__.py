"""Command line of the WAN lab: creates a lab, opens shells on its hosts, and changes its links while it runs.

python -m tests.wan up --host a:20/100:nat --host b --delay 20    # or: up lab.toml
python -m tests.wan shell a                                       # from here on in other terminals
python -m tests.wan set a b --delay 50 --loss 0.01
python -m tests.wan cut a b
"""

import argparse
import os
import sys
import threading
from pathlib import Path as FilePath

from tests.wan import namespaces, traffic
from tests.wan.calibration import CELLS, calibrate, calibrate_ring
from tests.wan.control import running_labs
from tests.wan.lab import Lab, RunningLab
from tests.wan.topology import Host, HostChanges, Path, PathChanges, Topology, read_topology


def main() -> int:
    """Returns the exit status: that of the command on a host, or 2 after an error message of one sentence."""
    arguments = _parser().parse_args()
    try:
        return int(arguments.do(arguments) or 0)
    except (ValueError, OSError, namespaces.LabError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _up(arguments: argparse.Namespace) -> int:
    if (arguments.file is None) == (not arguments.host):
        raise ValueError("give either a TOML file or hosts with --host, for example --host a:20/100:nat --host b")
    if arguments.file is not None:
        topology = read_topology(arguments.file)
    else:
        topology = Topology(tuple(arguments.host), Path(**_path_changes(arguments)))
    with Lab(topology.hosts, topology.default, topology.paths, seed=topology.seed) as lab:
        _print_status(lab)
        if arguments.shell is not None:
            return _run(lab, arguments.shell, [])
        print("\nOpen a shell on a host with `python -m tests.wan shell HOST`. Ctrl-C ends the lab.", flush=True)
        threading.Event().wait()
    return 0


def _shell(arguments: argparse.Namespace) -> int:
    return _run(_find(arguments), arguments.host, arguments.command)


def _set(arguments: argparse.Namespace) -> None:
    lab = _find(arguments)
    path = (lab.path if arguments.one_way else lab.pair)(arguments.source, arguments.target)
    path.set(**_path_changes(arguments))


def _host(arguments: argparse.Namespace) -> None:
    changes = HostChanges()
    if "up" in arguments:
        changes["up_mbps"] = arguments.up
    if "down" in arguments:
        changes["down_mbps"] = arguments.down
    if arguments.nat is not None:
        changes["nat"] = arguments.nat
    _find(arguments).host(arguments.host).set(**changes)


def _cut(arguments: argparse.Namespace) -> None:
    lab = _find(arguments)
    (lab.path if arguments.one_way else lab.pair)(arguments.source, arguments.target).cut()


def _heal(arguments: argparse.Namespace) -> None:
    lab = _find(arguments)
    (lab.path if arguments.one_way else lab.pair)(arguments.source, arguments.target).heal()


def _status(arguments: argparse.Namespace) -> None:
    _print_status(_find(arguments))


def _measure(arguments: argparse.Namespace) -> None:
    lab = _find(arguments)
    source, target = lab.host(arguments.source), lab.host(arguments.target)
    times = traffic.ping(source, target, count=10)
    if times:
        print(f"round trip: median {traffic.median_ms(times):.2f} ms, {len(times)} of 10 came back")
    else:
        print("round trip: none of 10 datagrams came back")
    result = traffic.throughput(source, target, arguments.seconds, warmup_seconds=1.0)
    print(f"TCP payload {source.name} -> {target.name}: {result.mbps:.1f} Mbit/s over {arguments.seconds:g} s")


def _calibrate(arguments: argparse.Namespace) -> None:
    cells = CELLS[::4] if arguments.quick else CELLS
    print(
        f"{'Mbit/s':>7}{'RTT ms':>8}  {'ping ms min':>13}{'median':>9}  {'TCP Mbit/s':>10}{'of rate':>9}  switch busy"
    )
    for rate_mbps, rtt_ms in cells:
        row = calibrate(rate_mbps, rtt_ms, seconds=2.0 if arguments.quick else 4.0)
        fraction = "-" if row.rate_mbps is None else f"{row.tcp_mbps / row.rate_mbps:.3f}"
        print(
            f"{_rate(row.rate_mbps):>7}{row.rtt_ms:>8g}  {row.min_ms:>13.2f}{row.median_ms:>9.2f}"
            f"  {row.tcp_mbps:>10.1f}{fraction:>9}  {row.busy_fraction:.2f}",
            flush=True,
        )
    ring = calibrate_ring(hosts=8, rate_mbps=100, rtt_ms=50, seconds=2.0 if arguments.quick else 4.0)
    print(
        f"{ring.hosts} hosts in a ring, {ring.rate_mbps:g} Mbit/s and 50 ms each: "
        f"total TCP payload {ring.tcp_mbps:.0f} Mbit/s, switch busy {ring.busy_fraction:.2f}"
    )


def _find(arguments: argparse.Namespace) -> RunningLab:
    labs = running_labs()
    if arguments.lab is None:
        if len(labs) == 1:
            return RunningLab(labs[0])
        if not labs:
            raise ValueError("no lab is running: start one with `python -m tests.wan up`")
        raise ValueError(f"several labs are running, choose one with --lab: {', '.join(labs)}")
    return RunningLab(arguments.lab)


def _print_status(lab: RunningLab) -> None:
    status = lab.status()
    print(f"lab {lab.name}" + ("" if status["real_time"] else " (without real-time priority: times are less exact)"))
    print(f"\n{'host':<16}{'address':<16}{'up':>9}{'down':>9}  {'sent':>12}{'received':>12}  Mbit/s, bytes")
    for name, host in status["hosts"].items():
        counters = host["counters"]
        print(
            f"{name:<16}{status['addresses'][name]:<16}{_rate(host['up_mbps']):>9}{_rate(host['down_mbps']):>9}"
            f"  {counters['sent_bytes']:>12}{counters['received_bytes']:>12}  {'NAT' if host['nat'] else ''}"
        )
    print(f"\n{'path':<24}{'delay ms':>9}{'loss':>9}{'rate':>9}  {'passed':>12}{'lost':>12}  Mbit/s, bytes, packets")
    for path in status["paths"]:
        counters = path["counters"]
        ends = f"{path['source']} -> {path['target']}"
        gone = counters["lost_packets"] + counters["cut_packets"] + counters["dropped_packets"]
        print(
            f"{ends:<24}{path['delay_ms']:>9g}{path['loss']:>9g}{_rate(path['rate_mbps']):>9}"
            f"  {counters['passed_bytes']:>12}{gone:>12}  {'CUT' if path['cut'] else ''}"
        )


def _rate(rate_mbps: float | None) -> str:
    return "-" if rate_mbps is None else f"{rate_mbps:g}"


def _run(lab: RunningLab, host: str, command: list[str]) -> int:
    """Runs a command on a host in this terminal, or the user's shell if there is none; returns its exit status."""
    environment = {**os.environ, "WAN_HOST": host}
    return lab.host(host).run(command or [os.environ.get("SHELL", "sh")], env=environment).returncode


def _path_changes(arguments: argparse.Namespace) -> PathChanges:
    changes = PathChanges()
    if "delay" in arguments:
        changes["delay_ms"] = arguments.delay
    if "loss" in arguments:
        changes["loss"] = arguments.loss
    if "rate" in arguments:
        changes["rate_mbps"] = arguments.rate
    return changes


def _limit(text: str) -> float | None:
    return None if text in ("-", "none") else float(text)


def _parse_host(text: str) -> Host:
    """`NAME`, `NAME:UP/DOWN` in Mbit/s (`-` for no limit), and `:nat` at the end."""
    name, *rest = text.split(":")
    nat = rest[-1:] == ["nat"]
    if nat:
        rest.pop()
    try:
        up, slash, down = rest[0].partition("/") if rest else ("-", "/", "-")
        if not slash or len(rest) > 1:
            raise ValueError(f"not {text}")
        return Host(name, _limit(up), _limit(down), nat)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"a host is NAME, NAME:UP/DOWN or NAME:UP/DOWN:nat ({error})") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.wan", description="Simulated internet between real hosts on one machine."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    path_settings = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    path_settings.add_argument("--delay", type=float, metavar="MS", help="one way")
    path_settings.add_argument("--loss", type=float, metavar="FRACTION", help="of packets, 0 to 1")
    path_settings.add_argument("--rate", type=_limit, metavar="MBPS", help="of the path itself; - for no limit")
    running = argparse.ArgumentParser(add_help=False)
    running.add_argument("--lab", help="name of the lab, if several run")
    ends = argparse.ArgumentParser(add_help=False)
    ends.add_argument("source")
    ends.add_argument("target")
    way = argparse.ArgumentParser(add_help=False)
    way.add_argument("--one-way", action="store_true", help="only from the first host to the second")

    up = commands.add_parser("up", parents=[path_settings], help="create a lab; it lives until Ctrl-C")
    up.add_argument("file", nargs="?", type=FilePath, help="a TOML file (docs/wan-lab.md)")
    up.add_argument("--host", action="append", type=_parse_host, metavar="NAME[:UP/DOWN][:nat]")
    up.add_argument("--shell", metavar="HOST", help="open a shell on that host here; the lab ends with it")
    up.set_defaults(do=_up)

    shell = commands.add_parser("shell", parents=[running], help="open a shell, or run a command, on a host")
    shell.add_argument("host")
    shell.add_argument("command", nargs=argparse.REMAINDER)
    shell.set_defaults(do=_shell)

    change = commands.add_parser("set", parents=[running, ends, way, path_settings], help="change a path")
    change.set_defaults(do=_set)
    host = commands.add_parser("host", parents=[running], help="change a host's lines, or put it behind a NAT")
    host.add_argument("host")
    host.add_argument("--up", type=_limit, metavar="MBPS", default=argparse.SUPPRESS)
    host.add_argument("--down", type=_limit, metavar="MBPS", default=argparse.SUPPRESS)
    host.add_argument("--nat", action=argparse.BooleanOptionalAction)
    host.set_defaults(do=_host)
    commands.add_parser("cut", parents=[running, ends, way], help="cut a path").set_defaults(do=_cut)
    commands.add_parser("heal", parents=[running, ends, way], help="heal a path").set_defaults(do=_heal)
    commands.add_parser("status", parents=[running], help="settings and counters").set_defaults(do=_status)
    measure = commands.add_parser("measure", parents=[running, ends], help="round trip and TCP throughput")
    measure.add_argument("--seconds", type=float, default=5.0)
    measure.set_defaults(do=_measure)
    calibration = commands.add_parser("calibrate", help="measure the accuracy of labs on this machine, in new labs")
    calibration.add_argument("--quick", action="store_true", help="three cells, two seconds each")
    calibration.set_defaults(do=_calibrate)
    return parser


if __name__ == "__main__":
    sys.exit(main())

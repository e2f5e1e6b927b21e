"""Accuracy of the lab on this machine: measured TCP throughput and round-trip time against the configured values."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from tests.wan import traffic
from tests.wan.lab import Lab
from tests.wan.topology import Host, Path

CELLS: Final[tuple[tuple[float | None, float], ...]] = (
    (20, 10),
    (20, 50),
    (20, 100),
    (20, 200),
    (100, 10),
    (100, 50),
    (100, 100),
    (100, 200),
    (500, 10),
    (500, 50),
    (500, 200),
    (None, 0),
)
"""Rate of all lines in Mbit/s, and round trip in ms."""


@dataclass(frozen=True)
class Calibration:
    rate_mbps: float | None
    rtt_ms: float
    min_ms: float
    median_ms: float
    tcp_mbps: float
    """TCP payload after the warm-up. Because of the headers it is at most 0.965 of the line's rate."""
    busy_fraction: float
    """Share of one core that the switch uses during the TCP transfer, with the kernel's work for the receiving host."""


@dataclass(frozen=True)
class RingCalibration:
    hosts: int
    rate_mbps: float
    tcp_mbps: float
    """Total TCP payload of all hosts; at most 0.965 of their rates, less the acknowledgements."""
    busy_fraction: float


def calibrate(rate_mbps: float | None, rtt_ms: float, seconds: float) -> Calibration:
    """Measures two hosts with lines of that rate in both directions; TCP for `seconds` after a warm-up."""
    hosts = [Host(name, up_mbps=rate_mbps, down_mbps=rate_mbps) for name in "ab"]
    with Lab(hosts, Path(delay_ms=rtt_ms / 2)) as lab:
        a, b = lab.host("a"), lab.host("b")
        times = traffic.ping(a, b, 20)
        busy_before, started = lab.status()["busy_seconds"], time.monotonic()
        result = traffic.throughput(a, b, seconds, warmup_seconds=1 + rtt_ms * 0.02)
        busy = (lab.status()["busy_seconds"] - busy_before) / (time.monotonic() - started)
    return Calibration(rate_mbps, rtt_ms, min(times) * 1e3, traffic.median_ms(times), result.mbps, busy)


def calibrate_ring(hosts: int, rate_mbps: float, rtt_ms: float, seconds: float) -> RingCalibration:
    """Measures the capacity of the switch: every host sends to the next one, all lines are full in both directions."""
    names = [f"h{number}" for number in range(hosts)]
    lines = [Host(name, up_mbps=rate_mbps, down_mbps=rate_mbps) for name in names]
    with Lab(lines, Path(delay_ms=rtt_ms / 2)) as lab, ThreadPoolExecutor(hosts) as pool:
        busy_before, started = lab.status()["busy_seconds"], time.monotonic()
        transfers = [
            pool.submit(traffic.throughput, lab.host(name), lab.host(after), seconds, 1 + rtt_ms * 0.02)
            for name, after in zip(names, [*names[1:], names[0]], strict=True)
        ]
        total = sum(transfer.result().mbps for transfer in transfers)
        busy = (lab.status()["busy_seconds"] - busy_before) / (time.monotonic() - started)
    return RingCalibration(hosts, rate_mbps, total, busy)

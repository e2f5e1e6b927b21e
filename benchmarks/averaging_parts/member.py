"""Common part of the member processes of all contenders: the exchange with the benchmark, the values, and their check.

A member gets its place as arguments and communicates in lines of JSON. It prints its address and reads the addresses of
all members. Then it prints "ready", waits for a line, averages, prints the time, and so on until the input ends. It
needs torch alone, so that it also runs where Ravnest is not installed.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_SAMPLED = 997
"""One value of this many is compared with its expected value."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of this member: its index, the number of members, its address, and the number of values to average."""

    index: int
    count: int
    host: str
    values: int
    folder: str
    extra: str

    @property
    def mean_factor(self) -> float:
        return (self.count + 1) / 2


def my_place() -> Place:
    """The place given on the command line. Also limits torch to one thread."""
    parser = argparse.ArgumentParser()
    for name, kind in (("index", int), ("count", int), ("host", str), ("values", int), ("folder", str), ("extra", str)):
        parser.add_argument(name, type=kind)
    torch.set_num_threads(1)
    return Place(**vars(parser.parse_args()))


def meet(address: str) -> list[str]:
    """Print the address of this member, and return the addresses of all members."""
    _say(address)
    addresses: list[str] = json.loads(sys.stdin.readline())
    return addresses


def base_values(place: Place) -> torch.Tensor:
    """The same values for all members. Member i contributes (i + 1) times these, so the mean is `mean_factor` times
    these."""
    return torch.randn(place.values, generator=torch.Generator().manual_seed(0))


def serve(
    prepare: Callable[[], Any], average: Callable[[Any], torch.Tensor], check: Callable[[torch.Tensor], None]
) -> None:
    """Average for each line of the input. `prepare` runs before, without being measured."""
    while True:
        prepared = prepare()
        _say("ready")
        if not sys.stdin.readline():
            return
        began, used = time.perf_counter(), _processor_seconds()
        try:
            result = average(prepared)
        except Exception as error:
            _say({"failed": f"{error}" or type(error).__name__})
            continue
        seconds, used = time.perf_counter() - began, _processor_seconds() - used
        del prepared
        try:
            check(result)
        except AssertionError as error:
            # The check fails if a peer gave up on a member and continued without it.
            _say({"failed": str(error)})
            continue
        # Otherwise the next round would free this memory, and that time would be measured.
        del result
        _say({"seconds": seconds, "processor_seconds": used})


def check_mean(result: torch.Tensor, base: torch.Tensor, factor: float, tolerance: float) -> None:
    """Check some of the values; `tolerance` is relative to the largest of them."""
    expected = base[::_SAMPLED] * factor
    off = float((result[::_SAMPLED] - expected).abs().max() / expected.abs().max())
    assert off <= tolerance, f"the mean is off by {off:.2e} of the largest value, {tolerance:.0e} is allowed"


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)

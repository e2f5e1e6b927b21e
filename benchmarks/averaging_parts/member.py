"""What a member process of any contender shares: how it speaks with the benchmark, its values, the check of its mean.

A member gets its place as arguments and speaks in lines of JSON. It says its address, is told everybody's, then says
"ready", waits for a line, averages, says how long that took, and so on until there are no more lines. Needs torch and
nothing else, so that it also runs where Ravnest is not installed.
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
"""Every so many values are compared with what they should be."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which member this is, of how many, where it listens, and how many values there are to average."""

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
    """Of the command line. From here on torch computes on one thread."""
    parser = argparse.ArgumentParser()
    for name, kind in (("index", int), ("count", int), ("host", str), ("values", int), ("folder", str), ("extra", str)):
        parser.add_argument(name, type=kind)
    torch.set_num_threads(1)
    return Place(**vars(parser.parse_args()))


def meet(address: str) -> list[str]:
    """Says where this member can be reached; where all of them can."""
    _say(address)
    addresses: list[str] = json.loads(sys.stdin.readline())
    return addresses


def base_values(place: Place) -> torch.Tensor:
    """The same for all members: member i contributes (i + 1) times this, so the mean is `mean_factor` times this."""
    return torch.randn(place.values, generator=torch.Generator().manual_seed(0))


def serve(
    prepare: Callable[[], Any], average: Callable[[Any], torch.Tensor], check: Callable[[torch.Tensor], None]
) -> None:
    """Averages whenever it is told to. What `prepare` returns is made before that, and does not count."""
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
            # A peer may give up on a member and go on without it: then it has not done what was asked.
            _say({"failed": str(error)})
            continue
        # Else the next round would give the memory back, and that would count.
        del result
        _say({"seconds": seconds, "processor_seconds": used})


def check_mean(result: torch.Tensor, base: torch.Tensor, factor: float, tolerance: float) -> None:
    """`tolerance` is a share of the largest of the values that are looked at."""
    expected = base[::_SAMPLED] * factor
    off = float((result[::_SAMPLED] - expected).abs().max() / expected.abs().max())
    assert off <= tolerance, f"the mean is off by {off:.2e} of the largest value, {tolerance:.0e} is allowed"


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)

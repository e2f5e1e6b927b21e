"""A connection that dies silently is noticed within seconds, and a slow and full connection stays."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path as FilePath

import pytest

from ravnest.net.connection import PING_ANSWER_SECONDS, PING_SECONDS
from tests.wan import Host, Lab, Path
from tests.wan.lab import LabHost
from tests.wan.link_end import make_ends
from tests.wan.needs import need_lab

pytestmark = pytest.mark.timeout(200)

NOTICED_SECONDS = PING_SECONDS + PING_ANSWER_SECONDS + 2.0
BACK_SECONDS = 6.0
"""The end that dials retries after at most two seconds, and may wait for an answer for as long."""


class End:
    """One end of a link, and its output."""

    def __init__(self, host: LabHost, folder: FilePath, which: str, address: str, frame_bytes: int) -> None:
        words = [sys.executable, "-m", "tests.wan.link_end", str(folder), which, address, str(frame_bytes)]
        self._process = host.warm(words, stdout=subprocess.PIPE, text=True)
        self._said: list[tuple[float, str]] = []
        self._more = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def until(self, word: str, timeout_seconds: float, after: float = 0.0) -> float:
        """The first time after this one at which it printed the word."""
        deadline = time.monotonic() + timeout_seconds
        with self._more:
            while not (times := self.times(word, after)):
                left = deadline - time.monotonic()
                assert left > 0 and self._more.wait(left), f"{word} was not said in time, but {self._said[-5:]}"
        return times[0]

    def times(self, word: str, after: float = 0.0) -> list[float]:
        return [at for at, said in self._said if said == word and at > after]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            at, word = line.split()
            with self._more:
                self._said.append((float(at), word))
                self._more.notify_all()


@dataclass(frozen=True)
class Pair:
    """Two hosts that no other test step uses."""

    lab: Lab
    name: str
    folder: FilePath

    @property
    def hosts(self) -> tuple[str, str]:
        return f"{self.name}a", f"{self.name}b"

    def linked(self, frame_bytes: int, both_ways: bool = False) -> tuple[End, End]:
        """Both ends of a link, connected; the first sends frames of this size at full speed."""
        self.folder.mkdir()
        make_ends(self.folder)
        here, there = map(self.lab.host, self.hosts)
        address = f"{there.address}:7000"
        called = End(there, self.folder, "called", address, frame_bytes if both_ways else 0)
        called.until("listens", 100.0)
        dials = End(here, self.folder, "dials", address, frame_bytes)
        for end in (called, dials):
            end.until("up", 100.0)
        return dials, called


def is_noticed_at_both_ends_and_back_soon_after(pair: Pair, both_ways: bool, frame_bytes: int) -> None:
    ends = pair.linked(frame_bytes)
    time.sleep(2.0)
    cut = time.monotonic()
    pair.lab.cut(*pair.hosts) if both_ways else pair.lab.path(*pair.hosts).cut()
    for end in ends:
        assert end.until("down", 30.0, cut) - cut < NOTICED_SECONDS
    pair.lab.heal(*pair.hosts)
    healed = time.monotonic()
    for end in ends:
        assert end.until("up", 30.0, cut) - healed < BACK_SECONDS
    if frame_bytes:
        ends[1].until("got", 30.0, healed)


def is_not_taken_for_dead(pair: Pair, frame_bytes: int, max_breaks: int = 0, **changes: float) -> None:
    ends = pair.linked(frame_bytes, both_ways=True)
    time.sleep(2.0)
    changed = time.monotonic()
    pair.lab.pair(*pair.hosts).set(**changes)  # type: ignore[arg-type]
    time.sleep(2 * NOTICED_SECONDS)
    for end in ends:
        breaks = end.times("down")
        assert len(breaks) <= max_breaks, [at - changed for at in breaks]
        for at in breaks:
            assert end.until("up", 30.0, at) - at < BACK_SECONDS
        end.until("got", 30.0, changed)


CASES: dict[str, Callable[[Pair], None]] = {
    "cut both ways": lambda pair: is_noticed_at_both_ends_and_back_soon_after(pair, True, 100_000),
    "cut one way": lambda pair: is_noticed_at_both_ends_and_back_soon_after(pair, False, 0),
    "frames of five seconds": lambda pair: is_not_taken_for_dead(pair, 12_000_000),
    # Nine of ten packets are lost at first, until both ends have adapted to the new rate. In one of 19 trials no frame
    # was confirmed for so long that the connection was given up; it returned within half a second.
    "a line that becomes ten times slower": lambda pair: is_not_taken_for_dead(pair, 2_000_000, 1, rate_mbps=2.0),
    "a line that loses a tenth": lambda pair: is_not_taken_for_dead(pair, 200_000, loss=0.1),
}


def test_links_that_are_cut_are_noticed_and_slow_and_full_links_stay(tmp_path: FilePath) -> None:
    """All cases run at once, each on two hosts of its own, because most of the time is waiting."""
    need_lab()
    names = [chr(ord("p") + number) for number in range(len(CASES))]
    hosts = [Host(f"{name}{end}", up_mbps=20, down_mbps=100) for name in names for end in "ab"]
    with Lab(hosts, default=Path(delay_ms=30)) as lab, ThreadPoolExecutor(len(CASES)) as pool:
        running = {
            case: pool.submit(check, Pair(lab, name, tmp_path / name))
            for name, (case, check) in zip(names, CASES.items(), strict=True)
        }
        failed = {case: error for case, future in running.items() if (error := future.exception()) is not None}
    assert not failed, failed

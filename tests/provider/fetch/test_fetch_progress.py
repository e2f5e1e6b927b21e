"""How far a fetch is reaches the coordinator and the terminal, and neither is flooded."""

import asyncio
import io

import pytest

from ravnest.net.v1.control_pb2 import ArtifactRef, Deploy, ProviderMessage
from ravnest.provider.fetch import progress as module
from ravnest.provider.fetch.progress import FetchLine, FetchProgress, fetching


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Heard:
    def __init__(self) -> None:
        self.messages: list[ProviderMessage] = []
        self.came = asyncio.Event()

    async def send(self, message: ProviderMessage) -> None:
        self.messages.append(message)
        self.came.set()


def an_order() -> Deploy:
    return Deploy(deployment="d1", graph=ArtifactRef(size_bytes=100), weights=ArtifactRef(size_bytes=900))


def a_progress(seconds: float, kept: int = 0, fetched: int = 0, total: int = 812_000_000) -> FetchProgress:
    now = [0.0]
    progress = FetchProgress(total, lambda: now[0])
    now[0] += seconds
    progress.kept_bytes, progress.fetched_bytes = kept, fetched
    return progress


def test_a_line_says_how_much_how_fast_and_how_long() -> None:
    halfway = a_progress(10, kept=100_000_000, fetched=250_000_000)
    assert halfway.line() == "fetching the stage: 43 % of 812.0 MB, 25.0 MB/s, 0:18 left"
    assert a_progress(0).line() == "fetching the stage: 0 % of 812.0 MB"
    assert a_progress(10, fetched=811_999_999).line().startswith("fetching the stage: 99 %")
    assert halfway.last_line() == "fetched 250.0 MB at 25.0 MB/s; 100.0 MB were here already"


def test_a_terminal_has_one_line_and_a_log_one_now_and_then() -> None:
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        line = FetchLine(stream)
        for tenth in range(250):
            line.show(a_progress(tenth / 10, fetched=tenth * 1_000_000))
        line.end(a_progress(25, fetched=250_000_000))
    assert terminal.getvalue().count("\n") == 1 and terminal.getvalue().endswith("fetched 250.0 MB at 10.0 MB/s\n")
    assert [text.partition(" of")[0] for text in log.getvalue().splitlines()] == [
        "fetching the stage: 12 %",
        "fetching the stage: 24 %",
        "fetched 250.0 MB at 10.0 MB/s",
    ]


def test_a_fetch_that_took_no_time_says_nothing() -> None:
    log = io.StringIO()
    FetchLine(log).end(a_progress(0.1, fetched=100))
    assert log.getvalue() == ""


def test_the_coordinator_hears_of_it_while_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TELL_SECONDS", 0.01)

    async def test() -> None:
        heard = Heard()
        async with fetching(an_order(), heard, None) as progress:
            for received in (430, 1000):
                progress.fetched_bytes = received
                heard.came.clear()
                await heard.came.wait()
            await asyncio.sleep(0.05)  # Nothing is said while nothing comes.
        told = [message.fetching for message in heard.messages]
        assert [(f.deployment, f.received_bytes, f.total_bytes) for f in told] == [
            ("d1", 430, 1000),
            ("d1", 1000, 1000),
        ]
        count = len(heard.messages)
        progress.fetched_bytes = 2000
        await asyncio.sleep(0.05)
        assert len(heard.messages) == count, "it goes on after its end"

    asyncio.run(test())

"""A provider that was stopped or cut off, and given up meanwhile, takes part again by itself when it returns."""

import asyncio
import signal
import time
from pathlib import Path

import pytest

from tests.coordinator.health.watched import Watched, watched
from tests.e2e.command import Running
from tests.known_speed import speed_is_known
from tests.net.frozen_line import frozen_line
from tests.net.swarm_ends import run

pytestmark = pytest.mark.timeout(120)


async def has_joined(swarm: Watched, name: str, other_than: str = "") -> str:
    """The session of a provider that is here, once it has another than this one."""
    members = swarm.connected.swarm.members
    await swarm.until(lambda: members.is_present(name) and members[name].session != other_than, 60.0)
    return members[name].session


async def is_given_up(swarm: Watched, name: str) -> None:
    """Others wait for it from now on, and a standby could take its place."""
    swarm.connected.swarm.members[name].reports = True
    swarm.replacements[name] = "standby"
    swarm.blocking.add(name)
    await swarm.until(lambda: name in swarm.lost)


def test_a_process_that_was_stopped_joins_again_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    speed_is_known(tmp_path)

    async def test() -> None:
        async with watched() as swarm:
            await swarm.provider("ben")
            words = ("join", swarm.connected.invite().line, "--name", "anna", "--listen", "127.0.0.1:0", "--cache", "0")
            with Running(*words, folder=tmp_path, warm=True) as anna:
                session = await has_joined(swarm, "anna")
                await swarm.until(lambda: swarm.is_well("anna"))
                anna.signal(signal.SIGSTOP)
                stopped = time.monotonic()
                await is_given_up(swarm, "anna")
                reason, detect_seconds, at = swarm.lost["anna"]
                assert at - stopped < 8.0 and detect_seconds < 8.0 and "nothing received for" in reason
                assert not swarm.connected.swarm.members.is_present("anna")
                anna.signal(signal.SIGCONT)
                assert await has_joined(swarm, "anna", session) != session
                await swarm.until(lambda: swarm.is_well("anna"))
                assert anna.process.poll() is None
                anna.signal(signal.SIGINT)
                said = await asyncio.to_thread(anna.to_the_end)
                assert anna.process.returncode == 0 and said.count("joined 127.0.0.1") == 2, said

    run(test())


def test_a_process_that_was_cut_off_joins_again_when_the_line_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    speed_is_known(tmp_path)

    async def test() -> None:
        async with watched() as swarm, frozen_line(swarm.connected.port) as line:
            await swarm.provider("ben")
            invite = swarm.connected.swarm.admission.invite("127.0.0.1", line.port).line
            with Running(
                "join", invite, "--name", "anna", "--outbound-only", "--cache", "0", folder=tmp_path, warm=True
            ) as anna:
                session = await has_joined(swarm, "anna")
                await swarm.until(lambda: swarm.is_well("anna"))
                line.freeze()
                await is_given_up(swarm, "anna")
                # Long enough that it has noticed, and dials.
                await swarm.until(lambda: time.monotonic() - swarm.lost["anna"][2] > 6.0)
                line.thaw()
                healed = time.monotonic()
                assert await has_joined(swarm, "anna", session) != session
                assert time.monotonic() - healed < 15.0
                assert anna.process.poll() is None

    run(test())

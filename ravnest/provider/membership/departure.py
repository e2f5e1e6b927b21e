"""Departure of a provider: its user asks it to leave with a signal, and it hands over its stage first.

Asked once, the provider waits until another one has taken its stage; asked again, it leaves at once. An embedded
provider leaves at once, and ends when its parent process ends.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

from ravnest.net.v1.control_pb2 import Leave, ProviderMessage
from ravnest.provider.membership.session import SwarmSession

HAND_OVER_SECONDS: Final = 90.0
"""Timeout of a hand-over in which nothing is being sent. The coordinator releases the provider before."""
_POLL_SECONDS: Final = 5.0


class Departure:
    """Whether this provider has been asked to leave, and whether it leaves now. Used on the network's loop."""

    def __init__(self, can_hand_over: Callable[[], bool], say: Callable[[str], None]) -> None:
        """`can_hand_over`: there is a stage, and a coordinator that can give it to another provider."""
        self.reason = ""
        self._can_hand_over = can_hand_over
        self._say = say
        self._is_asked = asyncio.Event()
        self._leaves = asyncio.Event()

    @property
    def leaves_now(self) -> bool:
        return self._leaves.is_set()

    def on_signals(self) -> None:
        """Leave on Ctrl-C and on a polite kill."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.ask, f"signal {signal.Signals(number).name}")

    def ask(self, reason: str) -> None:
        """Ask the provider to leave."""
        self.reason = reason
        if self._is_asked.is_set() or not self._can_hand_over():
            self._leaves.set()
        self._is_asked.set()

    async def wait(self) -> None:
        """Wait until the provider leaves."""
        await self._leaves.wait()

    async def wait_for(self, seconds: float) -> bool:
        """Wait for this time at most; whether the provider leaves."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._leaves.wait()
            self._say(f"leaving the swarm: {self.reason}")
            return True
        return False

    async def hand_over(
        self,
        session: SwarmSession,
        moved_within: Callable[[float], bool],
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        """Once asked, let another provider take the stage, and leave when that is done or takes too long.

        `moved_within` tells whether some state was sent within this time; `on_begin` is called first. Never returns.
        """
        await self._is_asked.wait()
        on_begin()
        self._say("handing the stage over to another provider; press Ctrl-C again to leave at once")
        await session.control.send(ProviderMessage(leave=Leave(reason=self.reason)))
        await asyncio.sleep(HAND_OVER_SECONDS)
        while moved_within(HAND_OVER_SECONDS):
            await asyncio.sleep(_POLL_SECONDS)
        self._leaves.set()
        await asyncio.Event().wait()


def end_with_parent() -> None:
    """End this process as soon as its parent has ended, which holds the other end of the standard input."""

    def read() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            # No process is left to report to.
            os._exit(0)

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), read)

"""Session of a provider with its coordinator: two links, from joining to leaving."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

from ravnest.background import BackgroundTasks
from ravnest.errors import PeerError
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.streams.control_channel import ControlLink
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Leaving, ProviderMessage

PATIENCE_SECONDS = 60.0
"""Timeout of a coordinator that cannot be reached. Afterwards the provider tries to join again."""

LEAVE_SECONDS = 1.0
_QUIET_SECONDS = 1.0
"""The user does not hear of an interruption that is shorter."""


class SwarmSession:
    """The control link and the feed of one session. `keep_connected` makes their connections; `leave` or `close` ends
    them."""

    def __init__(self, client: CoordinatorClient, session: str) -> None:
        self.client = client
        self.feed = ResumableLink(f"the coordinator at {client.address}")
        self.control: ControlLink[ProviderMessage, CoordinatorMessage] = ControlLink(
            ResumableLink(f"the coordinator at {client.address}"), CoordinatorMessage
        )
        self._session = session

    async def keep_connected(self) -> None:
        """Connect both links, and reconnect them whenever they break. PeerError when the session is over."""
        control = self.control.link
        async with BackgroundTasks() as tasks:
            connecting = [
                tasks.spawn(control.keep_dialling(partial(self.client.control, self._session))),
                tasks.spawn(self.feed.keep_dialling(partial(self.client.feed, self._session))),
                tasks.spawn(control.fail_when_gone(PATIENCE_SECONDS)),
            ]
            try:
                done, _ = await asyncio.wait(connecting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                # Both links ended in order. The receiver still reads the messages that arrived before, which say why.
                await asyncio.Event().wait()
            except PeerError as error:
                # The session ends as a whole: when one link has failed, the other one fails too.
                control.fail(error)
                self.feed.fail(error)
                raise

    async def print_interruptions(self, say: Callable[[str], None]) -> None:
        """Tell the user when the connection is down for more than a moment, and when it is back. Runs forever."""
        link = self.control.link
        while True:
            await link.until_connected()
            await link.until_disconnected()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_QUIET_SECONDS):
                    await link.until_connected()
                continue
            say(f"the connection to {link.peer} is down; trying again")
            await link.until_connected()
            say("connected again, nothing was lost")

    async def leave(self, reason: str) -> None:
        """Tell the coordinator that this provider leaves, if the coordinator can be reached."""
        with contextlib.suppress(PeerError, TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await self.control.send(ProviderMessage(leaving=Leaving(reason=reason)))
                await self.control.link.close()

    async def close(self) -> None:
        """End both links and the connection under them."""
        for link in (self.control.link, self.feed):
            link.fail(PeerError("this session is over"))
        await self.client.close()

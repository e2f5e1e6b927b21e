"""A provider's stay in a swarm: its two links to the coordinator, from joining to leaving."""

import asyncio
import contextlib
from collections.abc import Callable

from ravnest.background import BackgroundTasks
from ravnest.errors import PeerError
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.streams.control_channel import ControlLink
from ravnest.net.streams.resumable_link import ResumableLink
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Leaving, ProviderMessage

PATIENCE_SECONDS = 60.0
"""How long a coordinator may be unreachable. It takes this node for gone sooner; to join anew is tried for longer."""

_LEAVE_SECONDS = 1.0
_TELL_SECONDS = 1.0


class Stay:
    """The links of one stay. `keep_connected` makes their connections; `leave` or `close` ends them."""

    def __init__(self, client: CoordinatorClient, session: str) -> None:
        self.client = client
        self.feed = ResumableLink(f"the coordinator at {client.address}")
        self.control: ControlLink[ProviderMessage, CoordinatorMessage] = ControlLink(
            ResumableLink(f"the coordinator at {client.address}"), CoordinatorMessage
        )
        self._session = session

    async def keep_connected(self) -> None:
        """Makes one connection after another for both links; PeerError when the stay is over."""
        control = self.control.link
        async with BackgroundTasks() as tasks:
            connecting = [
                tasks.spawn(control.keep_dialling(lambda: self.client.control(self._session))),
                tasks.spawn(self.feed.keep_dialling(lambda: self.client.feed(self._session))),
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

    async def tell_connection(self, say: Callable[[str], None]) -> None:
        """Says when the connection is down for more than a moment, and when it is back; for ever."""
        link = self.control.link
        while True:
            await link.until_connected()
            await link.until_disconnected()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TELL_SECONDS):
                    await link.until_connected()
                continue
            say(f"the connection to {link.peer} is down; trying again")
            await link.until_connected()
            say("connected again, nothing was lost")

    async def leave(self, reason: str) -> None:
        """Says goodbye, if anybody is there to hear it."""
        with contextlib.suppress(PeerError, TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self.control.send(ProviderMessage(leaving=Leaving(reason=reason)))
                await self.control.link.close()

    async def close(self) -> None:
        """Ends both links and the connection under them."""
        for link in (self.control.link, self.feed):
            link.fail(PeerError("this stay in the swarm is over"))
        await self.client.close()

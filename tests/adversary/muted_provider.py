"""A provider that does not do what it says: `ravnest join`, but for one thing that RAVNEST_MUTE names.

`forward`: from microbatch RAVNEST_FROM on it computes and sends nothing on to the next stage. `upload`: from that
checkpoint on it says that its state is being uploaded, more of it with every heartbeat, and uploads nothing.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable

from ravnest.cli.main import main
from ravnest.engine.messages import Message
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.v1.control_pb2 import Transfer
from ravnest.provider.replicas.outgoing import OutgoingTransfer
from ravnest.provider.stage.outbox import FrameOutbox

FROM = int(os.environ.get("RAVNEST_FROM", "0"))


def _send_nothing_on() -> None:
    forward = FrameOutbox.forward

    def muted(self: FrameOutbox, message: Message) -> None:
        if not message.marks.train or message.microbatch < FROM:
            forward(self, message)

    FrameOutbox.forward = muted  # type: ignore[method-assign]


def _upload_nothing() -> None:
    told: Callable[[OutgoingTransfer], Transfer] = OutgoingTransfer.told
    upload = CoordinatorClient.upload

    async def hang(self: CoordinatorClient, name: str, chunks: AsyncIterator[bytes]) -> None:
        if int(name.split("-")[1]) < FROM:
            await upload(self, name, chunks)
            return
        await asyncio.Event().wait()

    def lie(self: OutgoingTransfer) -> Transfer:
        transfer = told(self)
        transfer.done_bytes = int(transfer.total_bytes * min(0.9, transfer.seconds / 60))
        transfer.still_seconds = 0.0
        return transfer

    CoordinatorClient.upload = hang  # type: ignore[method-assign]
    OutgoingTransfer.told = lie  # type: ignore[method-assign]


if __name__ == "__main__":
    {"forward": _send_nothing_on, "upload": _upload_nothing}[os.environ["RAVNEST_MUTE"]]()
    sys.exit(main())

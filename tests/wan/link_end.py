"""One end of a link between two stages, as a process on a host of a lab: prints when its connection breaks and returns,
and sends frames as fast as possible if FRAME_BYTES is not 0.

    python -m tests.wan.link_end FOLDER called HOST:PORT FRAME_BYTES
    python -m tests.wan.link_end FOLDER dials HOST:PORT FRAME_BYTES

FOLDER has an identity for each end, made with `make_ends`. Each line on standard output is a time of the clock that all
hosts of a lab share, and a word: "up", "down", or "got" for a frame that has arrived.
"""

import asyncio
import sys
import time
from pathlib import Path

import torch

from ravnest.coordinator.access.admission import Admission
from ravnest.errors import PeerError
from ravnest.net.address import split_address
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.identity.certificates import certificate_pem, read_certificate
from ravnest.net.identity.identity import Identity
from ravnest.net.identity.node_identity import NodeIdentity
from ravnest.net.rpc.client import dial_link
from ravnest.net.rpc.server import ProviderServer
from ravnest.net.streams.frame_stream import Link
from ravnest.net.streams.resumable_link import ResumableLink


def make_ends(folder: Path) -> None:
    """Creates the identities of both ends, in one swarm."""
    admission = Admission.in_memory()
    (folder / "authority.pem").write_bytes(certificate_pem(admission.authority.certificate))
    for name in ("called", "dials"):
        (folder / name).mkdir()
        node = NodeIdentity.open(folder / name)
        token = admission.invite("127.0.0.1", 1).token
        admitted = admission.join(Identity("invite", token.id), node.request(), name)
        node.adopt(admitted.certificate, admission.authority.certificate)


def say(word: str) -> None:
    print(f"{time.monotonic():.3f} {word}", flush=True)


async def tell(link: ResumableLink) -> None:
    while True:
        await link.until_connected()
        say("up")
        await link.until_disconnected()
        say("down")


async def send(link: ResumableLink, frame_bytes: int) -> None:
    values = torch.zeros(frame_bytes, dtype=torch.uint8)
    number = 0
    while frame_bytes:
        await link.send(Frame(FrameKind.FORWARD, number, tensors={"x": values}))
        number += 1


async def receive(link: ResumableLink) -> None:
    while await link.receive() is not None:
        say("got")


class Called:
    def __init__(self, link: ResumableLink) -> None:
        self._link = link

    async def link(self, peer: str, connection: Link) -> None:
        await self._link.carry(connection)


async def main(folder: Path, which: str, address: str, frame_bytes: int) -> None:
    node = NodeIdentity.open(folder / which, read_certificate((folder / "authority.pem").read_bytes()))
    link = ResumableLink("the other end")
    tasks = [asyncio.create_task(work) for work in (tell(link), send(link, frame_bytes), receive(link))]
    if which == "called":
        server = ProviderServer(Called(link), node)
        server.neighbours = {"dials"}
        await server.start(*split_address(address))
        say("listens")
        await asyncio.Event().wait()
    else:
        await link.keep_dialling(lambda: dial_link(address, "called", node))
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    try:
        asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])))
    except PeerError as error:
        sys.exit(str(error))

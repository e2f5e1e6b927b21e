"""Fetching of replica parts that a stage starts from: from the disk here, or from other providers (*sources*)."""

import asyncio
import hashlib
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from ravnest.background import BackgroundTasks, in_thread
from ravnest.errors import GraphError, PeerError, RavnestError
from ravnest.graph.weights import WeightsReader
from ravnest.net.v1.control_pb2 import Deploy, PartSource
from ravnest.provider.machine.memory import available_bytes
from ravnest.provider.replicas.files import PartFiles, PartWriter, check_key
from ravnest.provider.replicas.links import PartLink, PartLinks
from ravnest.provider.replicas.transfer import MAX_BYTES, PartArrivals

MAX_SOURCES: Final = 1000
"""Maximum number of parts that a stage is joined from."""
SOURCE_SECONDS: Final = 30.0
"""Timeout of a source: until it is connected, and then until it begins to send."""


class PartFetcher:
    """Fetches the parts that orders name."""

    def __init__(self, files: PartFiles, links: PartLinks, say: Callable[[str], None]) -> None:
        """`say` prints a line for the user when the disk here does not take the part."""
        self._files = files
        self._links = links
        self._say = say
        self._expected: dict[str, PartLink] = {}
        """Links to the sources of the newest order, by their names."""

    def expect(self, order: Deploy) -> list[PartLink]:
        """Let the sources of this order dial from now on. Returns the links of the previous order, for the caller to
        close."""
        before = list(self._expected.values())
        nodes = [source.giver for source in _sources(order)[: MAX_SOURCES + 1] if source.giver.node]
        self._expected = {node.link: self._links.add(node) for node in nodes}
        return before

    async def fetch(self, order: Deploy) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors and metadata of the part that the order names. PeerError when they cannot be had, or are not what
        their owner recorded."""
        return await self._get(_sources(order)[0], keep=True)

    async def fetch_all(self, order: Deploy) -> list[tuple[dict[str, Tensor], dict[str, str]]]:
        """The same for every part that the order's stage is joined from, all at the same time."""
        if len(order.donors) > MAX_SOURCES:
            raise PeerError(f"a stage would start from {len(order.donors):,} parts, more than {MAX_SOURCES:,}")
        async with BackgroundTasks() as tasks:
            getting = [tasks.spawn(self._get(source, keep=False)) for source in order.donors]
            return list(await asyncio.gather(*getting))

    async def _get(self, source: PartSource, *, keep: bool) -> tuple[dict[str, Tensor], dict[str, str]]:
        key = check_key(source.key)
        if not source.giver.node:
            part = self._files.find(key, source.replica)
            _check_hash(source, part.sha256)
            return await in_thread(part.read)
        link = self._expected.pop(source.giver.link, None) or self._links.add(source.giver)
        try:
            arrivals = PartArrivals(await link.connected(SOURCE_SECONDS), self._begin(source, keep=keep))
            _, sink = await arrivals.next(SOURCE_SECONDS)
            return sink.read()
        except PeerError as error:
            said = f"{source.giver.node} did not send the part of {key} of replica {source.replica}: {error}"
            raise PeerError(said) from None
        finally:
            await link.close()

    def _begin(self, source: PartSource, *, keep: bool) -> "Callable[[int, int], _Sink]":
        def begin(replica: int, size_bytes: int) -> _Sink:
            if replica != source.replica:
                raise PeerError(f"replica {source.replica} is wanted, not {replica}")
            if size_bytes > MAX_BYTES:
                raise PeerError(f"a part of {size_bytes:,} bytes is more than the {MAX_BYTES:,} a part may have")
            if size_bytes > (free := available_bytes(torch.device("cpu"))):
                raise PeerError(
                    f"a part of {size_bytes:,} bytes does not fit into the {free:,} of memory that are free"
                )
            writer: PartWriter | None = None
            try:
                writer = self._files.begin(source.key, replica, size_bytes) if keep else None
            except RavnestError as error:
                self._say(f"going on in memory: {error}")
            return _Sink(size_bytes, writer, self._say, lambda sha256: _check_hash(source, sha256))

        return begin


def _sources(order: Deploy) -> list[PartSource]:
    """All parts that an order names."""
    own = PartSource(key=order.part_key, replica=order.part_replica, sha256=order.part_sha256, giver=order.giver)
    return [*([own] if order.part_key or order.giver.node else []), *order.donors]


def _check_hash(source: PartSource, sha256: str) -> None:
    if source.sha256 not in ("", sha256):
        raise PeerError("it is not the part that its owner recorded: its sha256 is another")


class _Sink:
    """Builds tensors from the bytes of a part, and writes them to the disk where the disk takes them."""

    def __init__(
        self,
        size_bytes: int,
        writer: PartWriter | None,
        say: Callable[[str], None],
        check: Callable[[str], None],
    ) -> None:
        """`check` gets the hash of all bytes, and raises PeerError if it is wrong."""
        self._check = check
        self._reader = WeightsReader(size_bytes)
        self._digest = hashlib.sha256()
        self._writer = writer
        self._say = say

    def feed(self, data: memoryview) -> None:
        self._digest.update(data)
        self._reader.feed(data)
        self._on_disk(lambda writer: writer.feed(data))

    def finish(self, sha256: str) -> None:
        if self._digest.hexdigest() != sha256:
            raise PeerError("it arrived damaged: its sha256 is another")
        self._check(sha256)
        self._on_disk(lambda writer: writer.finish(sha256))

    def discard(self) -> None:
        if self._writer is not None:
            self._writer.discard()

    def read(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        try:
            return self._reader.finish()
        except GraphError as error:
            raise PeerError(str(error)) from None

    def _on_disk(self, work: Callable[[PartWriter], object]) -> None:
        """Write to the disk. When the disk refuses, the stage starts from memory all the same."""
        if self._writer is not None:
            try:
                work(self._writer)
            except RavnestError as error:
                self._say(f"going on in memory: {error}")
                self._writer.discard()
                self._writer = None

"""A stage's graph and weights on their way to a provider: from its cache, or from the coordinator, or half and half.

Bytes go to whoever builds something of them as they come, so that nothing is held twice; on their way they are hashed
and, where there is a cache, written to it. What happens on failure:

- The connection breaks: the transfer goes on at the byte where it stopped, after pauses that grow. PeerError when not a
  byte has come for PATIENCE_SECONDS.
- The provider is ended in the middle: the next one on this machine goes on from what was written.
- What was on the disk is damaged: it is thrown out and fetched again.
- The disk refuses (it is full, say): a line says so, and the rest goes on in memory.
- The coordinator sends other bytes, or more of them, than it announced: RefusedError, and nothing is kept.
"""

import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Final, Protocol, TypeVar

from ravnest.background import in_thread
from ravnest.errors import GraphError, PeerError, RefusedError
from ravnest.net.streams.backoff import Backoff, BackoffLimits
from ravnest.net.v1.control_pb2 import ArtifactRef
from ravnest.provider.fetch.cache import ArtifactCache, KeptArtifact
from ravnest.provider.fetch.progress import FetchProgress, megabytes, percent

PATIENCE_SECONDS: Final = 120.0
MAX_BACKOFF_SECONDS: Final = 5.0
_TRIES: Final = 3
"""How often what is kept may turn out to be damaged before the cache is left alone."""


class Source(Protocol):
    """Where artifacts come from: a CoordinatorClient."""

    def fetch(self, artifact: str, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """The bytes from `offset` on; RefusedError when to ask again is in vain, any other PeerError when it is not."""


class ArtifactSink(Protocol):
    """Who builds something of the bytes."""

    def feed(self, chunk: bytes) -> None:
        """Takes the bytes that follow; GraphError when they make no sense."""


SinkT = TypeVar("SinkT", bound=ArtifactSink)
A = TypeVar("A")
T = TypeVar("T")


class Artifacts:
    """Gets artifacts for one provider, from `source` and, unless it is None, through `cache`."""

    def __init__(
        self, source: Source, cache: ArtifactCache | None = None, say: Callable[[str], None] = lambda text: None
    ) -> None:
        """`say` gets a line for the user when something does not go as it should."""
        self._source = source
        self._cache = cache
        self._say = say

    @property
    def cached(self) -> bool:
        """Whether what was fetched once is there the next time."""
        return self._cache is not None

    async def get(self, ref: ArtifactRef, begin: Callable[[], SinkT], progress: FetchProgress) -> SinkT:
        """What `begin` made, fed with every byte of the artifact, whose hash is the announced one.

        `begin` is called again, for a new beginning, when what was on the disk turns out to be damaged.
        """
        if re.fullmatch("[0-9a-f]{64}", ref.sha256) is None:
            raise RefusedError(f"the artifact {ref.id} has no sha256 to check it by")
        for _ in range(_TRIES):
            kept = await self._open(ref)
            if kept is None:
                break
            try:
                return await self._transfer(ref, begin(), progress, kept)
            except _DamagedError:
                # The one of the loop's next turn is made when this one's memory is free again.
                self._say(f"what this machine had kept of {ref.id} is damaged: fetching it again")
            finally:
                kept.close()
        return await self._transfer(ref, begin(), progress, None)

    async def _open(self, ref: ArtifactRef) -> KeptArtifact | None:
        """What the cache has of it, to read and to add to; None when it goes without the cache."""
        while self._cache is not None:
            try:
                kept = await in_thread(partial(self._cache.open, ref.sha256, ref.size_bytes))
            except BlockingIOError:
                self._say(f"waiting for {ref.id}: another provider on this machine is fetching it")
                await self._cache.wait(ref.sha256)
            except OSError as error:
                self._go_without(error)
            else:
                if kept is None:
                    self._say(f"{ref.id} has {megabytes(ref.size_bytes)}, more than the cache may hold: not kept")
                return kept
        return None

    async def _transfer(
        self, ref: ArtifactRef, sink: SinkT, progress: FetchProgress, kept: KeptArtifact | None
    ) -> SinkT:
        """Feeds the sink with what is kept and then with the rest, which is kept as well."""
        digest, from_disk, fetched = hashlib.sha256(), 0, 0
        own = kept is not None and kept.size_bytes > 0

        def take(data: bytes) -> int:
            digest.update(data)
            sink.feed(data)
            return len(data)

        def read_on(kept: KeptArtifact) -> int:
            data = kept.read(from_disk)
            return take(data) if data else 0

        try:
            while kept is not None and (size := await in_thread(partial(read_on, kept))):
                from_disk += size
                progress.kept_bytes += size
            if from_disk < ref.size_bytes:
                async for data in self._fetched(ref, from_disk):
                    fetched += take(data)
                    progress.fetched_bytes += len(data)
                    if kept is not None and not await self._append(kept, data):
                        kept = None
            _check(ref, from_disk + fetched, digest.hexdigest())
        except (GraphError, _OtherBytesError, OSError) as error:
            if kept is not None:
                kept.discard()
            # No verdict on the coordinator where some of the bytes were this machine's own.
            if not own:
                raise
            progress.kept_bytes -= from_disk
            progress.fetched_bytes -= fetched
            raise _DamagedError(str(error)) from None
        if kept is not None and fetched:
            await self._finish(kept)
        return sink

    async def _fetched(self, ref: ArtifactRef, offset: int) -> AsyncIterator[bytes]:
        """The bytes from `offset` on, over as many connections as it takes."""
        backoff = Backoff(BackoffLimits(soon_seconds=MAX_BACKOFF_SECONDS, last_seconds=MAX_BACKOFF_SECONDS))
        while True:
            try:
                async with aclosing(self._source.fetch(ref.id, offset)) as chunks:
                    async for data in chunks:
                        offset += len(data)
                        if offset > ref.size_bytes:
                            raise _OtherBytesError(
                                f"the artifact {ref.id} is larger than the {ref.size_bytes} bytes announced"
                            )
                        backoff.reset()
                        yield data
                return
            except RefusedError:
                raise
            except PeerError as error:
                if offset == ref.size_bytes:
                    return
                if backoff.elapsed_seconds > PATIENCE_SECONDS:
                    raise PeerError(f"{ref.id} stopped at byte {offset} of {ref.size_bytes}: {error}") from None
                if backoff.is_first:
                    self._say(f"the transfer of {ref.id} broke off at {percent(offset, ref.size_bytes)}: {error}")
            await backoff.wait()

    async def _append(self, kept: KeptArtifact, data: bytes) -> bool:
        """Writes what has come to the disk; whether that went well."""
        try:
            await in_thread(partial(kept.append, data))
        except OSError as error:
            kept.discard()
            self._go_without(error)
            return False
        return True

    async def _finish(self, kept: KeptArtifact) -> None:
        try:
            await in_thread(kept.finish)
            if self._cache is not None:
                await in_thread(self._cache.trim)
        except OSError as error:
            self._go_without(error)

    def _go_without(self, error: OSError) -> None:
        self._say(f"cannot keep the stage on this disk ({error.strerror or error}): going on in memory")
        self._cache = None


class _OtherBytesError(RefusedError):
    """The bytes are not those that were announced."""


class _DamagedError(Exception):
    """The bytes are not those that were announced, and some of them were this machine's own."""


def _check(ref: ArtifactRef, size_bytes: int, sha256: str) -> None:
    if size_bytes != ref.size_bytes:
        raise _OtherBytesError(f"the artifact {ref.id} ended after {size_bytes} of {ref.size_bytes} bytes")
    if sha256 != ref.sha256:
        raise _OtherBytesError(
            f"the artifact {ref.id} arrived damaged (its sha256 is {sha256[:12]}…, not {ref.sha256[:12]}…)"
        )

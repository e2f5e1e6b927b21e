"""Artifacts of a stage, its graph and its weights, from this provider's cache, from the coordinator, or from both.

Tensors of the weights may also be drawn here or come from files on this machine, see `nearest`.

The bytes go straight to a sink that builds something from them, so that memory does not hold them twice. On their way
they are hashed and, with a cache, written to it. On failure:

- the connection breaks: the transfer resumes at the byte where it stopped, with a backoff; PeerError when no byte has
  arrived for PATIENCE_SECONDS;
- the provider is killed in the middle: the next one on this machine resumes from the bytes on the disk;
- the bytes on the disk are damaged: they are deleted and fetched again;
- the disk fails or is full: the user gets a line, and the transfer goes on in memory;
- the coordinator sends other bytes than it announced, or more: RefusedError, and nothing is stored.
"""

import hashlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Final, Protocol, TypeVar

from ravnest.background import in_thread
from ravnest.errors import GraphError, PeerError, RefusedError
from ravnest.graph.initial_weights.sources_text import WeightSources
from ravnest.net.streams.backoff import Backoff, BackoffLimits
from ravnest.net.v1.control_pb2 import ArtifactRef
from ravnest.provider.fetch.cache import ArtifactCache, KeptArtifact
from ravnest.provider.fetch.local_weights import LocalWeights
from ravnest.provider.fetch.nearest import NearestSource
from ravnest.provider.fetch.progress import FetchProgress, megabytes, percent

PATIENCE_SECONDS: Final = 120.0
MAX_BACKOFF_SECONDS: Final = 5.0
_TRIES: Final = 3
"""Times that cached bytes may turn out to be damaged before the transfer goes on without the cache."""


class Source(Protocol):
    """A source of artifacts: a CoordinatorClient."""

    def fetch(self, artifact: str, offset: int = 0, end: int = 0) -> AsyncGenerator[bytes, None]:
        """The bytes from `offset` on, up to `end` unless it is 0; RefusedError when a retry would fail too, any other
        PeerError when it may succeed."""


class ArtifactSink(Protocol):
    """Builds something from the bytes of an artifact."""

    def feed(self, chunk: bytes) -> None:
        """Take the bytes that follow; GraphError when they are invalid."""


ListSources = Callable[[], Awaitable[WeightSources | None]]
"""Fetches the list of an artifact's tensors; None if every byte is to come from the coordinator."""

SinkT = TypeVar("SinkT", bound=ArtifactSink)
A = TypeVar("A")
T = TypeVar("T")


class Artifacts:
    """Gets artifacts for one provider, from `source` and, unless it is None, through `cache`."""

    def __init__(
        self,
        source: Source,
        cache: ArtifactCache | None = None,
        say: Callable[[str], None] = lambda text: None,
        local: LocalWeights | None = None,
    ) -> None:
        """`say` prints a line for the user when something goes wrong. `local` has the weights in files on this
        machine."""
        self._source = source
        self._cache = cache
        self._say = say
        self._local = local

    @property
    def cached(self) -> bool:
        """Whether artifacts are stored on the disk, for the next time."""
        return self._cache is not None

    async def get(
        self,
        ref: ArtifactRef,
        begin: Callable[[], SinkT],
        progress: FetchProgress,
        listed: ListSources | None = None,
        *,
        keep: bool = True,
    ) -> SinkT:
        """The sink from `begin`, fed with every byte of the artifact, whose hash is the announced one.

        `listed` is called if bytes are missing, and says how to get tensors without the coordinator. Unless `keep`, the
        artifact does not go into the cache.
        `begin` is called again, to start over, when the bytes on the disk turn out to be damaged.
        """
        if re.fullmatch("[0-9a-f]{64}", ref.sha256) is None:
            raise RefusedError(f"the artifact {ref.id} has no sha256 to check it by")
        for _ in range(_TRIES if keep else 0):
            kept = await self._open(ref)
            if kept is None:
                break
            try:
                return await self._transfer(ref, begin(), progress, kept, listed)
            except _DamagedError:
                # The next turn of the loop makes a new sink, after the memory of this one is free.
                self._say(f"the copy of {ref.id} on this disk is damaged: fetching it again")
            finally:
                kept.close()
        return await self._transfer(ref, begin(), progress, None, listed)

    async def _open(self, ref: ArtifactRef) -> KeptArtifact | None:
        """The artifact's file in the cache, to read and to append; None without the cache."""
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
        self,
        ref: ArtifactRef,
        sink: SinkT,
        progress: FetchProgress,
        kept: KeptArtifact | None,
        listed: ListSources | None,
    ) -> SinkT:
        """Feed the sink with the stored bytes and then with the missing ones, which are stored as well."""
        digest, from_disk, fetched = hashlib.sha256(), 0, 0
        before = progress.counts
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
                sources = None if listed is None else await listed()
                async for data in self._missing(ref, from_disk, progress, sources):
                    fetched += take(data)
                    if kept is not None and not await self._append(kept, data):
                        kept = None
            _check(ref, from_disk + fetched, digest.hexdigest())
        except (GraphError, _OtherBytesError, OSError) as error:
            if kept is not None:
                kept.discard()
            # The coordinator is not blamed if some of the bytes came from this machine's own disk.
            if not own:
                raise
            progress.counts = before
            raise _DamagedError(str(error)) from None
        if kept is not None and fetched:
            await self._finish(kept)
        return sink

    def _missing(
        self, ref: ArtifactRef, offset: int, progress: FetchProgress, listed: WeightSources | None
    ) -> AsyncIterator[bytes]:
        """The bytes from `offset` on, from the nearest source of each tensor if they are listed."""

        def fetch(begin: int, end: int) -> AsyncIterator[bytes]:
            return self._fetched(ref, begin, end, progress)

        if listed is None:
            return fetch(offset, ref.size_bytes)
        return NearestSource(listed, self._local, fetch, progress, self._say).pieces(offset)

    async def _fetched(self, ref: ArtifactRef, offset: int, end: int, progress: FetchProgress) -> AsyncIterator[bytes]:
        """The bytes from `offset` to `end`, over as many connections as it takes."""
        backoff = Backoff(BackoffLimits(soon_seconds=MAX_BACKOFF_SECONDS, last_seconds=MAX_BACKOFF_SECONDS))
        while True:
            try:
                # Without an end, a coordinator that sends more than it announced is noticed.
                last = 0 if end == ref.size_bytes else end
                async with aclosing(self._source.fetch(ref.id, offset, last)) as chunks:
                    async for data in chunks:
                        offset += len(data)
                        if offset > end:
                            raise _OtherBytesError(f"the artifact {ref.id} is larger than the {end} bytes announced")
                        backoff.reset()
                        progress.fetched_bytes += len(data)
                        yield data
                if offset < end:
                    raise _OtherBytesError(f"the artifact {ref.id} ended after {offset} of {ref.size_bytes} bytes")
                return
            except RefusedError:
                raise
            except PeerError as error:
                if offset == end:
                    return
                if backoff.elapsed_seconds > PATIENCE_SECONDS:
                    raise PeerError(f"{ref.id} stopped at byte {offset} of {ref.size_bytes}: {error}") from None
                if backoff.is_first:
                    self._say(f"the transfer of {ref.id} broke off at {percent(offset, ref.size_bytes)}: {error}")
            await backoff.wait()

    async def _append(self, kept: KeptArtifact, data: bytes) -> bool:
        """Write bytes to the disk. Whether that succeeded."""
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
    """The bytes are not the announced ones."""


class _DamagedError(Exception):
    """The bytes are not the announced ones, and some of them came from this machine's own disk."""


def _check(ref: ArtifactRef, size_bytes: int, sha256: str) -> None:
    if size_bytes != ref.size_bytes:
        raise _OtherBytesError(f"the artifact {ref.id} ended after {size_bytes} of {ref.size_bytes} bytes")
    if sha256 != ref.sha256:
        raise _OtherBytesError(
            f"the artifact {ref.id} arrived damaged (its sha256 is {sha256[:12]}…, not {ref.sha256[:12]}…)"
        )

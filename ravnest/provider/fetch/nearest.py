"""Weights of a stage from the nearest source: drawn here, from a file on this machine, and only then over the network.

Each tensor that does not come over the network is hashed before it is used. It is held in memory once more while it is
passed on, one tensor at a time. A tensor that this machine cannot make is fetched, and the user gets a line.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from typing import Final

from torch import Tensor, uint8

from ravnest.background import in_thread
from ravnest.errors import GraphError
from ravnest.graph.initial_weights.find_initial import sha256_of
from ravnest.graph.initial_weights.sources_text import ListedTensor, WeightSources
from ravnest.provider.fetch.local_weights import LocalWeights
from ravnest.provider.fetch.progress import FetchProgress

_PIECE_BYTES: Final = 1 << 20

FetchRange = Callable[[int, int], AsyncIterator[bytes]]
"""The bytes from one offset to another, over the network."""


class NearestSource:
    """The bytes of one weights stream, in order."""

    def __init__(
        self,
        listed: WeightSources,
        local: LocalWeights | None,
        fetch: FetchRange,
        progress: FetchProgress,
        say: Callable[[str], None],
    ) -> None:
        self._listed = listed
        size_bytes = sum(tensor.entry.end - tensor.entry.begin for tensor in listed.tensors)
        self._local = None if local is None else local.search(size_bytes)
        self._fetch = fetch
        self._progress = progress
        self._say = say
        self._has_warned = False

    async def pieces(self, offset: int) -> AsyncGenerator[bytes, None]:
        """The bytes from `offset` on."""
        first = len(self._listed.header)
        if offset < first:
            self._progress.drawn_bytes += first - offset
            yield self._listed.header[offset:]
            offset = first
        for tensor in self._listed.tensors:
            begin, end = first + tensor.entry.begin, first + tensor.entry.end
            if end <= offset:
                continue
            data = await in_thread(partial(self._near, tensor)) if self._may_be_near(tensor) else None
            if data is None:
                continue
            # Everything before it that is not here comes in one piece.
            if offset < begin:
                async for piece in self._fetch(offset, begin):
                    yield piece
                offset = begin
            while offset < end:
                piece = await in_thread(partial(_copied, data, offset - begin))
                offset += len(piece)
                if tensor.recipe is None:
                    self._progress.found_bytes += len(piece)
                else:
                    self._progress.drawn_bytes += len(piece)
                yield piece
            del data
        last = first + (self._listed.tensors[-1].entry.end if self._listed.tensors else 0)
        if offset < last:
            async for piece in self._fetch(offset, last):
                yield piece

    def _may_be_near(self, tensor: ListedTensor) -> bool:
        return tensor.recipe is not None or self._local is not None

    def _near(self, tensor: ListedTensor) -> memoryview | None:
        """The bytes of a tensor from this machine; None if they are not here."""
        if tensor.recipe is not None:
            return self._drawn(tensor)
        return None if self._local is None else self._local.find(tensor)

    def _drawn(self, tensor: ListedTensor) -> memoryview | None:
        entry = tensor.entry
        assert tensor.recipe is not None
        try:
            made = tensor.recipe.make(entry.shape, entry.dtype)
        except GraphError as error:
            self._warn(str(error))
            return None
        if sha256_of(made) != tensor.sha256:
            self._warn("this machine rounds random values differently")
            return None
        return _bytes_of(made)

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._say(f"some first weights cannot be drawn here ({why}): fetching them")


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(uint8).numpy().data


def _copied(data: memoryview, offset: int) -> bytes:
    return bytes(data[offset : offset + _PIECE_BYTES])

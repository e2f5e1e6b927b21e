"""State of a stage at one version, which stays readable while the stage goes on training.

Freezing copies no large tensor. A reader on another thread goes through the tensors in pieces, and the stage
saves the old bytes of a piece right before it overwrites them, if the reader has not come there yet. So no task waits
for a copy of the whole state, and memory holds only what the reader is behind; when that is MAX_SAVED_BYTES, the stage
waits for the reader. A tensor that gets new memory instead of being overwritten costs nothing: the frozen state keeps
the old memory.

Small tensors are copied at once. A state with large tensors on another device than the CPU, or in another order than
that of their indices, cannot be frozen: the caller copies or writes it before the stage goes on.
"""

import threading
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from ravnest.errors import RunError
from ravnest.graph.weights import stream_header, stream_order, stream_size_bytes

PIECE_BYTES: Final = 1 << 20
MAX_SAVED_BYTES: Final = 256 << 20
"""Maximum size of saved pieces in memory."""
SMALL_BYTES: Final = 64 << 10
"""Tensors up to this size are copied at once: step counters, norms, model states."""


class FrozenState:
    """One state. Any one thread may read it once; the stage's thread calls `protect`."""

    def __init__(
        self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], max_saved_bytes: int = MAX_SAVED_BYTES
    ) -> None:
        self.size_bytes = stream_size_bytes(tensors, metadata)
        self._header = stream_header(tensors, metadata)
        self._max_saved_bytes = max_saved_bytes
        self._saved_bytes = 0
        self._condition = threading.Condition()
        self._tensors = [_FrozenTensor(tensors[name]) for name in stream_order(tensors)]
        self._by_address: dict[int, list[_FrozenTensor]] = {}
        for tensor in self._tensors:
            if tensor.address:
                self._by_address.setdefault(tensor.address, []).append(tensor)
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether it is read or given up, so that nothing has to be protected for it."""
        return self._is_over

    def chunks(self) -> Iterator[bytes]:
        """The state as `stream_tensors` yields it. It is over when the iteration ends. RunError when it is given up
        before all of it was read, or was read before."""
        try:
            self._check_readable()
            yield self._header
            for tensor in self._tensors:
                for piece in range(tensor.pieces):
                    with self._condition:
                        self._check_readable()
                        data, saved_bytes = tensor.take(piece)
                        self._saved_bytes -= saved_bytes
                        self._condition.notify_all()
                    yield data
        finally:
            self.release()

    def release(self) -> None:
        """Give the state up; idempotent."""
        with self._condition:
            self._is_over = True
            self._by_address = {}
            self._saved_bytes = 0
            for tensor in self._tensors:
                tensor.release()
            self._condition.notify_all()

    def protect(self, tensor: Tensor) -> None:
        """The memory of this tensor is about to be overwritten: save the bytes that the reader still needs. May wait
        for the reader."""
        if not tensor.is_cpu or not tensor.numel():
            return
        for frozen in self._by_address.get(tensor.untyped_storage().data_ptr(), ()):
            for piece in frozen.pieces_of(tensor):
                self._save(frozen, piece)

    def _check_readable(self) -> None:
        if self._is_over:
            raise RunError("the state of a stage was given up before all of it was read; use another replica")

    def _save(self, tensor: "_FrozenTensor", piece: int) -> None:
        with self._condition:
            # The reader needs no help to go on: it always comes to the end, or gives the state up.
            self._condition.wait_for(
                lambda: self._saved_bytes < self._max_saved_bytes or not tensor.needs(piece) or self._is_over
            )
            if not self._is_over and tensor.needs(piece):
                self._saved_bytes += tensor.save(piece)


class FrozenStates:
    """The frozen states of one stage that are not read yet. Used on the stage's thread."""

    def __init__(self) -> None:
        self._states: list[FrozenState] = []

    def add(self, state: FrozenState) -> None:
        self._states = [each for each in self._states if not each.is_over] + [state]

    def protect(self, tensor: Tensor) -> None:
        """The memory of this tensor is about to be overwritten."""
        for state in self._states:
            if not state.is_over:
                state.protect(tensor)


class StateTensors(dict[str, Tensor]):
    """The tensors of a stage's state, which share its memory, and a way to keep them as they are."""

    def __init__(self, tensors: Mapping[str, Tensor], frozen: FrozenStates) -> None:
        super().__init__(tensors)
        self._frozen = frozen

    def freeze(self, metadata: Mapping[str, str]) -> FrozenState | None:
        """The state, with this metadata, for a reader on another thread. To be called before the stage goes on. None if
        the state cannot be frozen."""
        if not all(map(_can_freeze, self.values())):
            return None
        state = FrozenState(self, metadata)
        self._frozen.add(state)
        return state


def _can_freeze(tensor: Tensor) -> bool:
    return tensor.nbytes <= SMALL_BYTES or (tensor.is_cpu and tensor.is_contiguous())


class _FrozenTensor:
    """One tensor, in pieces that are read in their order."""

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        is_shared = tensor.nbytes > SMALL_BYTES
        self.address = tensor.untyped_storage().data_ptr() if is_shared else 0
        """Address of the memory that the stage may overwrite; 0 for a copy."""
        own = tensor if is_shared else tensor.to("cpu", copy=True).contiguous()
        self._begin = int(own.storage_offset()) * own.itemsize
        self._bytes = own.reshape(-1).view(torch.uint8)
        self.pieces = -(-self._bytes.numel() // PIECE_BYTES)
        self._next = 0
        self._saved: dict[int, Tensor] = {}

    def pieces_of(self, tensor: Tensor) -> range:
        """The pieces that share memory with a tensor of the same storage."""
        begin, end = 0, tensor.untyped_storage().nbytes()
        if tensor.is_contiguous():
            begin = int(tensor.storage_offset()) * tensor.itemsize
            end = begin + tensor.nbytes
        first, last = begin - self._begin, min(end - self._begin, self._bytes.numel())
        return range(max(first, 0) // PIECE_BYTES, -(-max(last, 0) // PIECE_BYTES))

    def needs(self, piece: int) -> bool:
        """Whether the bytes of this piece are neither read nor saved."""
        return piece >= self._next and piece not in self._saved and self._bytes.numel() > 0

    def save(self, piece: int) -> int:
        """Save the bytes of this piece; returns their number."""
        self._saved[piece] = self._piece(piece).clone()
        return self._saved[piece].numel()

    def take(self, piece: int) -> tuple[bytes, int]:
        """The bytes of the next piece, and how many of them were saved."""
        saved = self._saved.pop(piece, None)
        self._next = piece + 1
        found = self._piece(piece) if saved is None else saved
        data = found.numpy().tobytes()
        if self._next == self.pieces:
            self.release()
        return data, 0 if saved is None else len(data)

    def release(self) -> None:
        self._bytes, self._saved = torch.empty(0, dtype=torch.uint8), {}

    def _piece(self, piece: int) -> Tensor:
        return self._bytes[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES]

"""Between a stage's device and the memory of its machine, beside the computation.

On CUDA what a stage puts out is coded there and copied to pinned memory on a stream of its own, which waits for just
what it copies; and what arrives is decoded on the device before the stage asks for it. The thread that computes waits
for neither. Elsewhere there is nothing to copy, or it is copied where a frame is packed.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from ravnest.net.frames.frames import Coded, Frame

Turn = Callable[[Frame], Frame]
"""Codes a frame, or decodes it, on whatever device its tensors are."""


class Transfers:
    """The copies of one stage. `mark` is for the thread that computes, the others for any other thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._compute = torch.cuda.default_stream(device)

    @property
    def on_host(self) -> bool:
        """Whether the stage computes in the memory of its machine, so that nothing is copied."""
        return self.device.type == "cpu"

    def mark(self) -> torch.cuda.Event | None:
        """Happens when everything is done that this thread has asked the device for; None where it is done already."""
        if not self._on_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def out(self, frame: Frame, mark: torch.cuda.Event | None, code: Turn) -> Frame:
        """The frame coded, once `mark` has happened, and then in the memory of the machine. Waits for that."""
        if not self._on_cuda:
            return code(frame)
        with torch.cuda.stream(self._out):
            if mark is not None:
                self._out.wait_event(mark)
            there = code(frame)
            here = replace(
                there,
                tensors={name: _pinned(tensor) for name, tensor in there.tensors.items()},
                coded={name: replace(packed, data=_pinned(packed.data)) for name, packed in there.coded.items()},
            )
            # Until then `frame` and `there` keep what is copied: its memory is nobody else's.
            self._out.synchronize()
        return here

    def into(self, frame: Frame, decode: Turn) -> Frame:
        """The frame on the device, and decoded there. Waits for that, so that the stage need not."""
        if not self._on_cuda:
            return decode(frame)
        with torch.cuda.stream(self._in):
            coded: dict[str, Coded] = {
                name: replace(packed, data=self._uploaded(packed.data)) for name, packed in frame.coded.items()
            }
            tensors = {name: self._uploaded(tensor) for name, tensor in frame.tensors.items()}
            there = decode(replace(frame, tensors=tensors, coded=coded))
            for tensor in there.tensors.values():
                # Made on this stream and used on another: not to be used again before that one is done with it.
                tensor.record_stream(self._compute)
            self._in.synchronize()
        return there

    def _uploaded(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(self.device, non_blocking=True)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory that the device writes by itself; it is there when the stream has come so far."""
    if tensor.is_cpu:
        return tensor
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)

"""Copies between a stage's device and main memory, concurrent with its computation.

On CUDA, outgoing tensors are coded on the device and copied to pinned memory on a separate stream, which waits only for
the tensors that it copies. Incoming tensors are decoded on the device before the stage asks for them. The computing
thread waits for neither. On other devices there is nothing to copy, or the packing of a frame copies it.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from ravnest.net.frames.frames import Coded, Frame

FrameCoder = Callable[[Frame], Frame]
"""Codes or decodes a frame, on the device of its tensors."""


class DeviceCopies:
    """The copies of one stage. The computing thread calls `mark`, any other thread the other methods."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._compute = torch.cuda.default_stream(device)

    @property
    def on_host(self) -> bool:
        """Whether the stage computes in main memory, so that nothing is copied."""
        return self.device.type == "cpu"

    def mark(self) -> torch.cuda.Event | None:
        """An event for the end of everything that this thread has asked the device to do; None if it is done
        already."""
        if not self._on_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def out(self, frame: Frame, mark: torch.cuda.Event | None, code: FrameCoder) -> Frame:
        """The frame, coded after the event `mark`, in main memory. Waits for that."""
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
            # Until then, `frame` and `there` keep the memory that is being copied.
            self._out.synchronize()
        return here

    def into(self, frame: Frame, decode: FrameCoder) -> Frame:
        """The frame on the device, decoded there. Waits for that, so that the stage need not."""
        if not self._on_cuda:
            return decode(frame)
        with torch.cuda.stream(self._in):
            coded: dict[str, Coded] = {
                name: replace(packed, data=self._uploaded(packed.data)) for name, packed in frame.coded.items()
            }
            tensors = {name: self._uploaded(tensor) for name, tensor in frame.tensors.items()}
            there = decode(replace(frame, tensors=tensors, coded=coded))
            for tensor in there.tensors.values():
                # Made on this stream and used on another one: its memory must not be reused before that stream is done
                # with it.
                tensor.record_stream(self._compute)
            self._in.synchronize()
        return there

    def _uploaded(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(self.device, non_blocking=True)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory that the device writes to by itself, complete when the stream has reached this point."""
    if tensor.is_cpu:
        return tensor
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)

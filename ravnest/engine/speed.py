"""How fast a device computes: a block of a transformer trained for a moment, in floating-point operations per second.

The block grows until a step takes long enough to be told from the overhead of starting it: a small processor is
measured with a small block, a large GPU with a large one. What is counted is the arithmetic of the matrix products;
what is timed is the whole step, with the optimizer. So the figure is one that training reaches.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

MEASUREMENT_VERSION: Final = 1
"""Of what is measured here and how; figures of another version are not comparable."""

MOST_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Speed:
    """What a device does in a second: operations on float32, and bytes read and written in its memory."""

    flops_per_second: float
    memory_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class BlockSize:
    """A block of this width, with a batch of so many tokens."""

    width: int
    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def flops(self) -> int:
        """Of one forward and backward: each product forward, and two of the same size backward."""
        weights = 12 * self.width * self.width
        attention = 2 * self.length * self.width
        return 3 * 2 * self.tokens * (weights + attention)

    @property
    def memory_bytes(self) -> int:
        """About what a step takes: weights, gradients, two moments, and what the backward needs."""
        return 4 * (4 * 12 * self.width * self.width + 32 * self.tokens * self.width)


SIZES: Final = (BlockSize(256, 2, 128), BlockSize(512, 8, 128), BlockSize(1024, 16, 256), BlockSize(2048, 32, 256))


def measure_speed(
    device: torch.device,
    memory_bytes: int,
    most_seconds: float = MOST_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Speed:
    """Measures for about `most_seconds`, on a very slow machine for as long as two steps take.

    A GPU is woken up first, which may take some seconds more.
    """
    if device.type != "cpu":
        next(_steps(SIZES[0], device))
    deadline = clock() + most_seconds
    flops_per_second = 0.0
    for size in SIZES:
        if flops_per_second and 2 * size.memory_bytes > memory_bytes:
            break
        step_seconds = _step_seconds(size, device, deadline, clock)
        flops_per_second = max(flops_per_second, size.flops / step_seconds)
        larger_takes = step_seconds * _growth(size)
        if step_seconds >= _LONG_ENOUGH_SECONDS or clock() + 2 * larger_takes > deadline:
            break
    return Speed(flops_per_second, _memory_rate(device, min(_COPY_BYTES, memory_bytes // 8), clock))


_LONG_ENOUGH_SECONDS: Final = 0.02
_MOST_STEPS: Final = 7
_HEADS: Final = 4
_COPY_BYTES: Final = 64 << 20


def _growth(size: BlockSize) -> float:
    place = SIZES.index(size)
    return SIZES[min(place + 1, len(SIZES) - 1)].flops / size.flops


def _step_seconds(size: BlockSize, device: torch.device, deadline: float, clock: Callable[[], float]) -> float:
    """The fastest of a few steps: what slows the others down is not the device."""
    steps = _steps(size, device)
    times: list[float] = []
    while True:
        began = clock()
        next(steps)
        times.append(clock() - began)
        # The first builds what later ones use again, and does not count.
        if len(times) > _MOST_STEPS or (len(times) > 1 and clock() + times[-1] > deadline):
            return min(times[1:])


def _steps(size: BlockSize, device: torch.device) -> Iterator[None]:
    """Trains the block, a step at each turn."""
    generator = torch.Generator(device).manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(shape, generator=generator, device=device)

    width = size.width
    project, merge, widen, narrow = (
        tensor(rows, columns).requires_grad_()
        for rows, columns in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    )
    optimizer = torch.optim.AdamW([project, merge, widen, narrow], lr=1e-4)
    inputs = tensor(size.sequences, size.length, width)
    while True:
        parts = F.linear(inputs, project).view(size.sequences, size.length, 3, _HEADS, width // _HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(inputs.shape)
        hidden = F.layer_norm(inputs + F.linear(attended, merge), (width,))
        outputs = hidden + F.linear(F.gelu(F.linear(hidden, widen)), narrow)
        torch.autograd.backward(outputs.square().mean())
        optimizer.step()
        optimizer.zero_grad()
        _wait_for(device)
        yield


def _memory_rate(device: torch.device, size_bytes: int, clock: Callable[[], float]) -> float:
    source = torch.zeros(max(1, size_bytes // 4), device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(4):
        began = clock()
        target.copy_(source)
        _wait_for(device)
        times.append(clock() - began)
    # Each byte is read once and written once; the first copy also gets the memory from the system.
    return 2 * source.nbytes / max(min(times[1:]), 1e-9)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()

"""Device speed: floating-point operations per second, measured by training a transformer block for a moment.

The block grows until a step takes clearly longer than the overhead of launching it, so an ordinary CPU is measured with
a small block and a large GPU with a large one. The operations are those of the matrix products; the time is that of the
whole step including the optimizer, so the result is a speed that training reaches. On a CPU with one computing thread
the time is that thread's CPU time, so other busy processes do not make the machine look slow.

The same block is measured in bfloat16 and float16, as a stage computes it in mixed precision: several times faster on a
GPU, and slower on a CPU without instructions for it. These measurements begin with a small block.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Final

import torch
import torch.nn.functional as F

from ravnest.engine.passes.precision import Precision
from ravnest.graph.clock import work_clock

MEASUREMENT_VERSION: Final = 3
"""Version of the method of measurement; figures of different versions are not comparable."""

MAX_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of a device: float32 operations, bytes read and written in memory, and operations in each mixed precision.

    A mixed precision that the device does not support has the float32 figure; 0 means not measured.
    """

    flops_per_second: float
    memory_bytes_per_second: float
    bfloat16_flops_per_second: float = 0.0
    float16_flops_per_second: float = 0.0

    def divided(self, slower: float) -> "Speed":
        """The speed of a device that is `slower` times as slow."""
        return Speed(*(figure / slower for figure in astuple(self)))

    def flops_in(self, precision: str) -> float:
        """Operations per second in one of settings.PRECISIONS; those in float32 if it was not measured."""
        halves = {"bfloat16": self.bfloat16_flops_per_second, "float16": self.float16_flops_per_second}
        return halves.get(precision, 0.0) or self.flops_per_second


@dataclass(frozen=True, slots=True)
class BlockSize:
    """Size of the block and of its batch."""

    width: int
    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def flops(self) -> int:
        """Operations of one forward and backward: each product once forward, and two of the same size backward."""
        weights = 12 * self.width * self.width
        attention = 2 * self.length * self.width
        return 3 * 2 * self.tokens * (weights + attention)

    @property
    def memory_bytes(self) -> int:
        """Approximate memory of a step: weights, gradients, two moments, and saved activations."""
        return 4 * (4 * 12 * self.width * self.width + 32 * self.tokens * self.width)


SIZES: Final = (BlockSize(384, 4, 128), BlockSize(768, 8, 128), BlockSize(1024, 16, 256), BlockSize(2048, 32, 256))
"""Only large CPUs and GPUs go beyond the first size; figures of different sizes differ by up to a third."""

HALVES: Final = ("bfloat16", "float16")

SMALL: Final = BlockSize(192, 2, 64)
"""First size in bfloat16 and float16, in which a step with a larger block can take seconds."""


def measure_speed(
    device: torch.device,
    memory_bytes: int,
    max_seconds: float = MAX_SECONDS,
    clock: Callable[[], float] | None = None,
    halves: Sequence[str] = HALVES,
) -> Speed:
    """Measures for about `max_seconds` at most, and again in each of the mixed precisions of `halves`; on a very slow
    machine for the time of two steps.

    The first step initializes the device, which may take some seconds more. `clock` replaces all clocks.
    """
    elapsed = clock or time.perf_counter
    worked = clock or (work_clock() if device.type == "cpu" else time.perf_counter)
    flops, largest = _flops(SIZES, device, "float32", memory_bytes, max_seconds, elapsed, worked)
    moved = _memory_rate(device, min(_COPY_BYTES, memory_bytes // 8), worked)
    found = dict.fromkeys(halves, flops)
    if torch.amp.is_autocast_available(device.type):
        for half in halves:
            found[half], _ = _flops(
                (SMALL, largest), device, half, memory_bytes, max_seconds, elapsed, worked, _HALF_STEPS
            )
    return Speed(flops, moved, found.get("bfloat16", 0.0), found.get("float16", 0.0))


_LONG_ENOUGH_SECONDS: Final = 0.02
_MAX_STEPS: Final = 7
_HALF_STEPS: Final = 2
"""Few steps suffice in mixed precision, where a factor is of interest and not a few per cent."""
_HEADS: Final = 4
_COPY_BYTES: Final = 64 << 20
_COPIES: Final = 8
_SHORTEST_SECONDS: Final = 1e-9


def _flops(
    sizes: Sequence[BlockSize],
    device: torch.device,
    precision: str,
    memory_bytes: int,
    max_seconds: float,
    elapsed: Callable[[], float],
    worked: Callable[[], float],
    max_steps: int = _MAX_STEPS,
) -> tuple[float, BlockSize]:
    """Operations per second with a block that grows while memory and time allow, and its last size."""
    deadline = float("inf")
    found, last = 0.0, sizes[0]
    for size, larger in itertools.pairwise((*sizes, sizes[-1])):
        if found and 2 * size.memory_bytes > memory_bytes:
            break
        steps, last = training_steps(size, device, precision), size
        # The first step initializes and is not counted.
        next(steps)
        deadline = min(deadline, elapsed() + max_seconds)
        step_seconds = _fastest(steps, deadline, elapsed, worked, max_steps)
        found = max(found, size.flops / step_seconds)
        larger_takes = step_seconds * larger.flops / size.flops
        if step_seconds >= _LONG_ENOUGH_SECONDS or elapsed() + 3 * larger_takes > deadline:
            break
    return found, last


def _fastest(
    steps: Iterator[None],
    deadline: float,
    elapsed: Callable[[], float],
    worked: Callable[[], float],
    max_steps: int = _MAX_STEPS,
) -> float:
    """Seconds of the fastest of a few steps; slower ones were delayed by something other than the device."""
    best = float("inf")
    for _ in range(max_steps):
        began, began_work = elapsed(), worked()
        next(steps)
        best = min(best, worked() - began_work)
        if 2 * elapsed() - began > deadline:
            break
    return max(best, _SHORTEST_SECONDS)


def training_steps(size: BlockSize, device: torch.device, precision: str) -> Iterator[None]:
    """Trains the block by one step per item."""
    autocast = Precision(precision, device).autocast
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
        with autocast():
            parts = F.linear(inputs, project).view(size.sequences, size.length, 3, _HEADS, width // _HEADS)
            query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
            attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(inputs.shape)
            hidden = F.layer_norm(inputs + F.linear(attended, merge), (width,))
            outputs = hidden + F.linear(F.gelu(F.linear(hidden, widen)), narrow)
        torch.autograd.backward(outputs.float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
        wait_for(device)
        yield


def _memory_rate(device: torch.device, size_bytes: int, worked: Callable[[], float]) -> float:
    source = torch.zeros(max(1, size_bytes // 4), device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(_COPIES):
        began = worked()
        target.copy_(source)
        wait_for(device)
        times.append(worked() - began)
    # Each byte is read once and written once. The first copy is not counted: it allocates the memory.
    return 2 * source.nbytes / max(min(times[1:]), _SHORTEST_SECONDS)


def wait_for(device: torch.device) -> None:
    """Waits until the device has finished all submitted work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()

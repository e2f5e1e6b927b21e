"""How fast a device computes: a block of a transformer trained for a moment, in floating-point operations per second.

The block grows until a step takes long enough to be told from the overhead of starting it: an ordinary processor is
measured with a small block, a large GPU with a large one. What is counted is the arithmetic of the matrix products;
what is timed is the whole step, with the optimizer. So the figure is one that training reaches. On a processor the time
is what the computing thread got of it, where there is one: others that are busy at that moment do not make the machine
slow.

The same block in bfloat16 and float16, as stages compute it in mixed precision, tells what that gains: several times on
a GPU, and on a processor that has no instructions for it the contrary. A small block is tried first there.
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
"""Of what is measured here and how; figures of another version are not comparable."""

MAX_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Speed:
    """What a device does in a second: operations on float32, bytes read and written in its memory, and operations in
    each mixed precision, which are those on float32 where it has none; 0: not measured."""

    flops_per_second: float
    memory_bytes_per_second: float
    bfloat16_flops_per_second: float = 0.0
    float16_flops_per_second: float = 0.0

    def divided(self, slower: float) -> "Speed":
        """Of a device that is so many times slower."""
        return Speed(*(figure / slower for figure in astuple(self)))

    def flops_in(self, precision: str) -> float:
        """Operations in one of settings.PRECISIONS; those on float32 where that was not measured."""
        halves = {"bfloat16": self.bfloat16_flops_per_second, "float16": self.float16_flops_per_second}
        return halves.get(precision, 0.0) or self.flops_per_second


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


SIZES: Final = (BlockSize(384, 4, 128), BlockSize(768, 8, 128), BlockSize(1024, 16, 256), BlockSize(2048, 32, 256))
"""All but large processors stay with the first: figures of different sizes of the block differ by up to a third."""

HALVES: Final = ("bfloat16", "float16")

SMALL: Final = BlockSize(192, 2, 64)
"""In bfloat16 or float16, a step of a larger one can take seconds."""


def measure_speed(
    device: torch.device,
    memory_bytes: int,
    max_seconds: float = MAX_SECONDS,
    clock: Callable[[], float] | None = None,
    halves: Sequence[str] = HALVES,
) -> Speed:
    """Measures for at most about `max_seconds`, and again in each of these mixed precisions; on a very slow machine
    for as long as two steps take.

    The first step wakes the device up, and may take some seconds more. `clock` replaces every clock that is looked at.
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
"""In mixed precision: how much faster or slower it is tells, not a few hundredths."""
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
    """Operations in a second with a block that grows while there are memory and time for it, and its last size."""
    deadline = float("inf")
    found, last = 0.0, sizes[0]
    for size, larger in itertools.pairwise((*sizes, sizes[-1])):
        if found and 2 * size.memory_bytes > memory_bytes:
            break
        steps, last = _steps(size, device, precision), size
        # It builds what later ones use again, and does not count.
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
    """Seconds of the fastest of a few steps: what slows the others down is not the device."""
    best = float("inf")
    for _ in range(max_steps):
        began, began_work = elapsed(), worked()
        next(steps)
        best = min(best, worked() - began_work)
        if 2 * elapsed() - began > deadline:
            break
    return max(best, _SHORTEST_SECONDS)


def _steps(size: BlockSize, device: torch.device, precision: str) -> Iterator[None]:
    """Trains the block, a step at each turn."""
    computing = Precision(precision, device).computing
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
        with computing():
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
    # Each byte is read once and written once; the first copy also gets the memory from the system.
    return 2 * source.nbytes / max(min(times[1:]), _SHORTEST_SECONDS)


def wait_for(device: torch.device) -> None:
    """Returns when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()

"""Optimizer moments in 8 bits between updates, with a scale for every block of 256 values.

As in Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), the levels are dense near zero, because
Adam divides one moment by the root of the other and needs both in relative precision. Here a value is the square of its
level, and a mean of squares the fourth power, so that levels reach four and nine decades below the largest value of the
block.

Values are rounded without a mean error. A mean of squares changes by a thousandth in an update, much less than the
distance between two levels, so it would hardly move if it were rounded to the nearest. The rounding therefore compares
the distance from the lower level with a threshold that changes with the update and with the value's place in its block,
by a fixed sequence that covers 0 to 1 evenly: two runs round in the same way.

Small parameters (norms, biases) keep their moments in float32.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from ravnest.spec import OptimizerSpec

BLOCK: Final = 256
MIN_VALUES: Final = 4096
"""Parameters with fewer values are not packed."""

_SIGNED: Final = frozenset({"exp_avg", "momentum_buffer"})
_SQUARES: Final = frozenset({"exp_avg_sq", "max_exp_avg_sq"})
_CHUNK_BLOCKS: Final = 512
"""Number of blocks that are converted at once: their temporary tensors fit into a processor's cache."""
_GPU_CHUNK_BLOCKS: Final = 1 << 16
_SPREAD: Final = (0.5698402909980532, 0.7548776662466927)
"""Steps of the thresholds over updates and over the values of a block: a sequence that is even in two dimensions
(Roberts, "The Unreasonable Effectiveness of Quasirandom Sequences", 2018)."""


class PackedMoment:
    """One moment in 8 bits."""

    __slots__ = ("codes", "scales", "shape")

    def __init__(self, codes: Tensor, scales: Tensor, shape: torch.Size) -> None:
        """`codes` has a row for each block, int8 for values with a sign and uint8 for others; `scales` is a column."""
        self.codes = codes
        self.scales = scales
        self.shape = shape

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def unpack(self) -> Tensor:
        """The moment in float32, in new memory."""
        values = torch.empty(self.codes.shape, dtype=torch.float32, device=self.codes.device)
        for row, codes, scales in _chunks(values, self.codes, self.scales):
            row.copy_(codes)
            if codes.dtype is torch.int8:
                row.mul_(row.abs())
            else:
                row.square_().square_()
            row.mul_(scales)
        return values.view(-1)[: self.shape.numel()].view(self.shape)


class FloatMoments:
    """The moments of one optimizer, always as they are."""

    def unpacked(self, parameters: Sequence[Tensor], updates: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def pack(self, parameters: Sequence[Tensor], updates: int) -> None:
        pass


class PackedMoments:
    """The moments of one optimizer: in 8 bits in its state, except within `unpacked`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @contextlib.contextmanager
    def unpacked(self, parameters: Sequence[Tensor], updates: int) -> Iterator[None]:
        """Context in which the optimizer's moments of these parameters are float32 tensors, and may be changed.

        `updates`: the number of updates so far, which selects the thresholds of the rounding.
        """
        for parameter in parameters:
            state = self._optimizer.state.get(parameter)
            if state:
                state.update(unpacked_state(state))
        try:
            yield
        finally:
            self.pack(parameters, updates)

    def pack(self, parameters: Sequence[Tensor], updates: int) -> None:
        """Packs the moments of these parameters that are float32 tensors."""
        for parameter in parameters:
            state = self._optimizer.state.get(parameter)
            if not state or parameter.numel() < MIN_VALUES:
                continue
            for name, moment in state.items():
                if name in _SIGNED | _SQUARES and isinstance(moment, Tensor) and moment.dtype is torch.float32:
                    state[name] = pack_moment(moment, updates, signed=name in _SIGNED)


def moments_in(form: str, optimizer: Optimizer) -> FloatMoments | PackedMoments:
    """The moments of the optimizer in this form, one of settings.MOMENTS; in float32 if they cannot be packed."""
    return PackedMoments(optimizer) if form == "8bit" and refusal(optimizer) is None else FloatMoments()


@contextlib.contextmanager
def reading(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Context in which the optimizer's moments of these parameters are float32 tensors that are only read."""
    packed = {parameter: dict(optimizer.state[parameter]) for parameter in parameters if parameter in optimizer.state}
    for parameter, state in packed.items():
        optimizer.state[parameter].update(unpacked_state(state))
    try:
        yield
    finally:
        for parameter, state in packed.items():
            optimizer.state[parameter].update(state)


def unpacked_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state of one parameter with float32 moments; those that are packed are in new memory."""
    return {name: value.unpack() if isinstance(value, PackedMoment) else value for name, value in state.items()}


def pack_moment(moment: Tensor, updates: int, *, signed: bool) -> PackedMoment:
    """The moment in 8 bits; without `signed`, it must have no negative value."""
    values = moment.detach().reshape(-1)
    blocks = -(-values.numel() // BLOCK)
    codes = torch.empty(blocks, BLOCK, dtype=torch.int8 if signed else torch.uint8, device=values.device)
    scales = torch.empty(blocks, 1, device=values.device)
    whole = values.numel() // BLOCK
    thresholds = _thresholds(updates, signed, values.device)
    code = _code_signed if signed else _code_squares
    for rows, coded, scale in _chunks(values[: whole * BLOCK].view(whole, BLOCK), codes[:whole], scales[:whole]):
        code(rows, coded, scale, thresholds)
    if whole < blocks:
        rest = torch.nn.functional.pad(values[whole * BLOCK :], (0, blocks * BLOCK - values.numel()))
        code(rest.view(1, BLOCK), codes[whole:], scales[whole:], thresholds)
    return PackedMoment(codes, scales, moment.shape)


def moments_refusal(form: str, spec: OptimizerSpec) -> str | None:
    """The reason why such an optimizer cannot hold its moments in this form; None if it can."""
    return None if form == "float32" else refusal(spec.build([Tensor(1, 1).zero_().requires_grad_()]))


def refusal(optimizer: Optimizer) -> str | None:
    """The reason why moments of this optimizer cannot be packed; None if they can."""
    name = type(optimizer).__name__
    if type(optimizer) not in (SGD, Adam, AdamW, NAdam):
        return f"the moments of {name} have no 8-bit form; it exists for Adam, AdamW, NAdam and SGD with momentum"
    if type(optimizer) is SGD and not optimizer.param_groups[0]["momentum"]:
        return "SGD without momentum has no moments"
    return None


def _code_signed(values: Tensor, codes: Tensor, scales: Tensor, thresholds: Tensor) -> None:
    """Levels -127 to 127; each stands for its square times the scale."""
    share = values.abs()
    torch.amax(share, 1, keepdim=True, out=scales)
    share.div_(scales.clamp(min=_TINY)).mul_(127.0**2)
    level = share.sqrt().floor_().clamp_(max=126)
    # The next level is 2 * level + 1 further.
    distance = share.addcmul_(level, level, value=-1)
    level.add_(torch.addcmul(thresholds, level, thresholds, value=2).le_(distance))
    codes.copy_(level.copysign_(values))
    scales.div_(127.0**2)


def _code_squares(values: Tensor, codes: Tensor, scales: Tensor, thresholds: Tensor) -> None:
    """Levels 0 to 255; each stands for its fourth power times the scale."""
    torch.amax(values, 1, keepdim=True, out=scales)
    share = values.div(scales.clamp(min=_TINY)).mul_(255.0**4)
    level = share.sqrt().sqrt_().floor_().clamp_(max=254)
    low = level.square().square_()
    distance = share.sub_(low)
    high = level.add(1).square_().square_()
    level.add_(high.sub_(low).mul_(thresholds).le_(distance))
    # Level 0 would make Adam divide by its epsilon alone.
    codes.copy_(level.clamp_(min=1))
    scales.div_(255.0**4)


_TINY: Final = 1e-38


def _thresholds(updates: int, signed: bool, device: torch.device) -> Tensor:
    """Between 0 and 1, never 0: a value that is exactly on a level stays there."""
    places = torch.arange(BLOCK, dtype=torch.float64) * _SPREAD[1]
    start = updates * _SPREAD[0] + (0.5 if signed else 0.0)
    return ((places + start) % 1).clamp_(min=1e-3).to(torch.float32).to(device)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    size = _CHUNK_BLOCKS if tensors[0].device.type == "cpu" else _GPU_CHUNK_BLOCKS
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)

"""float16 and bfloat16: two bytes per value, rounded to nearest.

Values beyond the range are clamped to its end. float16 is accurate for values around 1, such as activations, and rounds
values below 3e-8 to zero. bfloat16 has the range of float32, and an error of at most 1/256 of any value.
"""

import torch
from torch import Tensor

from ravnest.codecs.layout import bytes_of, check_size, numbers


class HalfCodec:
    """Codec of one 16-bit floating-point type."""

    lossy = True
    varies = False
    feedback = False
    block = 1

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        info = torch.finfo(dtype)
        self.name = name
        self.largest = info.max
        self._dtype = dtype
        self._smallest_normal = info.tiny
        self._half_step = info.eps / 2

    def size_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Tensor) -> Tensor:
        # Values beyond the range become infinite, and the clamp makes them finite.
        return bytes_of(values.to(self._dtype).clamp_(-self.largest, self.largest))

    def decode(self, data: Tensor, count: int) -> Tensor:
        check_size(self.name, data, count, self.size_bytes(count))
        return numbers(data, self._dtype).to(torch.float32)

    def error(self, largest: float) -> float:
        # Steps do not get smaller below the smallest normal number.
        rounding = max(min(largest, self.largest), self._smallest_normal) * self._half_step
        return max(rounding, largest - self.largest)

"""bfloat16: two bytes a value, rounded to nearest, with the range of float32."""

from typing import Final

import torch
from torch import Tensor

from ravnest.codecs.layout import SMALLEST_NORMAL, bytes_of, check_size, numbers

_END: Final = torch.finfo(torch.bfloat16).max
_HALF_STEP: Final = 2.0**-8


class BFloat16Codec:
    """Keeps the size of every value, large or small, to 1/256 of it."""

    name = "bfloat16"
    lossy = True
    varies = False
    feedback = False
    largest = _END

    def size_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Tensor) -> Tensor:
        # float32 reaches a little further than bfloat16, and rounds to infinity there.
        return bytes_of(values.to(torch.bfloat16).clamp_(-_END, _END))

    def decode(self, data: Tensor, count: int) -> Tensor:
        check_size(self.name, data, count, self.size_bytes(count))
        return numbers(data, torch.bfloat16).to(torch.float32)

    def error(self, largest: float) -> float:
        return max(largest, SMALLEST_NORMAL) * _HALF_STEP

"""float16: two bytes a value, rounded to nearest. What is beyond its range becomes the end of the range."""

from typing import Final

import torch
from torch import Tensor

from ravnest.codecs.layout import bytes_of, check_size, numbers

_END: Final = torch.finfo(torch.float16).max
_HALF_STEP: Final = 2.0**-11
_SMALLEST_HALF_STEP: Final = 2.0**-25


class Float16Codec:
    """Fine for values around 1, such as activations; poor for small ones: below 3e-8 they become zero."""

    name = "float16"
    lossy = True
    varies = False
    feedback = False
    largest = _END

    def size_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Tensor) -> Tensor:
        return bytes_of(values.to(torch.float16).clamp_(-_END, _END))

    def decode(self, data: Tensor, count: int) -> Tensor:
        check_size(self.name, data, count, self.size_bytes(count))
        return numbers(data, torch.float16).to(torch.float32)

    def error(self, largest: float) -> float:
        rounded = max(min(largest, _END) * _HALF_STEP, _SMALLEST_HALF_STEP)
        return max(rounded, largest - _END)

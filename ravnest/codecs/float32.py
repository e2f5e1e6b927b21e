"""float32: the values unchanged, without a copy."""

import torch
from torch import Tensor

from ravnest.codecs.layout import LARGEST, bytes_of, check_size, numbers


class Float32Codec:
    """Four bytes per value, lossless."""

    name = "float32"
    lossy = False
    varies = False
    feedback = False
    block = 1
    largest = LARGEST

    def size_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, values: Tensor) -> Tensor:
        return bytes_of(values)

    def decode(self, data: Tensor, count: int) -> Tensor:
        check_size(self.name, data, count, self.size_bytes(count))
        return numbers(data, torch.float32)

    def error(self, largest: float) -> float:
        return 0.0

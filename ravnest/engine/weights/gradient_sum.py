"""Sum of the weight gradients of one update."""

from collections.abc import Iterable, Mapping

import torch


class GradientSum:
    """Weight gradients by name, summed over the microbatches of one update. Each has memory of its own."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.versions: list[int] = []
        """The version that the forward of each added microbatch used."""
        self.part_of = 1
        """The least number of microbatches that the mean is taken over."""

    def add(
        self, gradients: Mapping[str, torch.Tensor | None], version: int, others: Iterable[torch.Tensor] = ()
    ) -> None:
        """Adds the gradients of a microbatch whose forward used this version. Their memory is taken over if possible.

        `others`: gradients of activations, which may share memory with these.
        """
        # Autograd may return one tensor as the gradient of two values, or an expanded tensor of a single number. A sum
        # is changed in place, so it needs memory of its own.
        taken = {gradient.untyped_storage().data_ptr() for gradient in others}
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            if name in self.tensors:
                self.tensors[name].add_(gradient)
                continue
            memory = gradient.untyped_storage().data_ptr()
            own = memory not in taken and 0 not in gradient.stride()
            self.tensors[name] = gradient if own else gradient.clone(memory_format=torch.contiguous_format)
            taken.add(memory)
        self.versions.append(version)

    @property
    def divisor(self) -> int:
        """The number that makes the sum a mean."""
        return max(len(self.versions), self.part_of)

    @property
    def mean_version(self) -> float:
        return sum(self.versions) / len(self.versions)

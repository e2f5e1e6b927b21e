"""Sum of the weight gradients of one update."""

from collections.abc import Iterable, Mapping

import torch


class GradientSum:
    """Weight gradients by name, summed over the microbatches of one update."""

    def __init__(self, accumulate: int) -> None:
        """`accumulate`: the largest number of microbatches that may be added."""
        self.tensors: dict[str, torch.Tensor] = {}
        self.versions: list[int] = []
        """The version that the forward of each added microbatch used."""
        self._is_single = accumulate == 1

    def add(
        self, gradients: Mapping[str, torch.Tensor | None], version: int, sent: Iterable[torch.Tensor] = ()
    ) -> None:
        """Adds the gradients of a microbatch whose forward used this version; they may share memory with `sent`."""
        # Autograd may return one tensor as the gradient of two values, or an expanded tensor of a single number. A sum
        # that is changed in place needs memory of its own, apart from the gradients sent to the stage before.
        taken = {gradient.untyped_storage().data_ptr() for gradient in sent}
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            if name in self.tensors:
                self.tensors[name].add_(gradient)
                continue
            memory = gradient.untyped_storage().data_ptr()
            own = self._is_single and memory not in taken and 0 not in gradient.stride()
            self.tensors[name] = gradient if own else gradient.clone(memory_format=torch.contiguous_format)
            taken.add(memory)
        self.versions.append(version)

    @property
    def mean_version(self) -> float:
        return sum(self.versions) / len(self.versions)

    def divide(self) -> None:
        """Turns the sum into the mean over the microbatches."""
        if len(self.versions) > 1:
            for tensor in self.tensors.values():
                tensor.div_(len(self.versions))

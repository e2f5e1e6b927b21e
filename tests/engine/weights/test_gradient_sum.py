"""Summed gradients have memory of their own, and take over that of the first gradient where nobody else uses it."""

import torch

from ravnest.engine.weights.gradient_sum import GradientSum


def test_the_memory_of_the_first_gradient_becomes_that_of_the_sum() -> None:
    summed = GradientSum()
    first, second = torch.ones(3), torch.full((3,), 2.0)
    summed.add({"w": first, "unused": None}, 4)
    summed.add({"w": second}, 5)
    assert summed.tensors["w"] is first and first.tolist() == [3.0] * 3
    assert second.tolist() == [2.0] * 3
    assert summed.mean_version == 4.5 and summed.tensors.keys() == {"w"}


def test_memory_that_another_gradient_uses_is_copied() -> None:
    summed = GradientSum()
    shared, exchanged = torch.ones(3), torch.ones(3)
    summed.add({"a": shared, "b": shared, "c": exchanged.view(3, 1), "d": torch.ones(1).expand(3)}, 0, [exchanged])
    for tensor in summed.tensors.values():
        tensor.mul_(2)
    assert exchanged.tolist() == [1.0] * 3
    assert all(tensor.flatten().tolist() == [2.0] * 3 for tensor in summed.tensors.values())

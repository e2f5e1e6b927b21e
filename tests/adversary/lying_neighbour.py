"""A provider that lies to its neighbours and to the coordinator: `ravnest join`, but for what its stage puts out.

RAVNEST_LIE names the lie, and RAVNEST_LIE_FROM the first microbatch that it is told of.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ravnest.cli.main import main
from ravnest.engine.messages import Message
from ravnest.provider.stage.outbox import FrameOutbox

LIE, FIRST = os.environ["RAVNEST_LIE"], int(os.environ["RAVNEST_LIE_FROM"])


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Message], Message]:
    """Changes every tensor of floats in a message."""

    def changed(value: Any) -> Any:
        return change(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return lambda message: replace(message, values={name: changed(value) for name, value in message.values.items()})


def shorter(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1].clone() if tensor.dim() else tensor


def not_a_number(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, torch.nan)


def with_another_sample(message: Message) -> Message:
    return replace(message, marks=replace(message.marks, samples=message.marks.samples + 1))


LIES: dict[str, tuple[str, Callable[[Message], Message]]] = {
    "activations of a smaller batch": ("forward", each(shorter)),
    "another number of samples": ("forward", with_another_sample),
    "gradients of a smaller batch": ("backward", each(shorter)),
    "activations that are no numbers": ("forward", each(not_a_number)),
    "gradients that are no numbers": ("backward", each(not_a_number)),
    "a better score": (
        "evaluated",
        lambda message: replace(
            message, values={"loss": 0.001, **dict.fromkeys(message.values.keys() - {"loss"}, 1.0)}
        ),
    ),
}


def _lie_to_others() -> None:
    direction, change = LIES[LIE]
    honest = getattr(FrameOutbox, direction)

    def lie(self: FrameOutbox, message: Message) -> None:
        honest(self, change(message) if abs(message.microbatch) >= FIRST else message)

    setattr(FrameOutbox, direction, lie)


def _save_noise() -> None:
    honest = FrameOutbox.save

    def lie(
        self: FrameOutbox, checkpoint: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
    ) -> None:
        noise = {
            name: torch.randn_like(tensor) if name.startswith("param:") else tensor for name, tensor in tensors.items()
        }
        honest(self, checkpoint, noise, metadata)

    FrameOutbox.save = lie  # type: ignore[method-assign]


if __name__ == "__main__":
    if LIE == "noise":
        _save_noise()
    else:
        _lie_to_others()
    sys.exit(main())

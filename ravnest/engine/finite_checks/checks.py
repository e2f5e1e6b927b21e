"""Checks that losses, gradients that arrive, and parameters to be saved are finite.

A failed check raises NotFiniteError before anything is applied, sent or saved, and the worker stops. The coordinator
then asks each stage for a `StageDiagnosis` to find the origin of the value. For this purpose a stage remembers whether
the gradients that it received and sent for its latest microbatches were finite.
"""

import math
from collections.abc import Callable, Mapping
from typing import Final

import torch

from ravnest.engine.finite_checks.device_read import start_reading
from ravnest.engine.finite_checks.origin import ForwardDiagnosis, StageDiagnosis, State, all_finite, steep
from ravnest.errors import RavnestError
from ravnest.graph.portable import PortableGraph

Tensors = Mapping[str, torch.Tensor]

_REMEMBERED: Final = 64
"""Microbatches for which the stage remembers whether the gradients that it sent are finite."""


class NotFiniteError(RavnestError):
    """A loss, a gradient or a parameter is not a finite number."""


class FiniteChecks:
    """The checks of one worker; used on its thread."""

    def __init__(self) -> None:
        self._sent: dict[int, list[Callable[[], float]]] = {}
        """Pending reads of whether each gradient that was sent is finite; by microbatch."""
        self._bad: set[int] = set()
        """Microbatches for which gradients arrived that are not finite."""

    def start(self, gradients: Tensors | None) -> dict[str, Callable[[], float]]:
        """Starts the checks of gradients that arrived, without waiting for the device."""
        return {name: start_reading(all_finite(g)) for name, g in (gradients or {}).items()}

    def check_gradients(self, microbatch: int, are_finite: Mapping[str, Callable[[], float]]) -> None:
        """Waits for the checks that `start` returned."""
        for name, is_finite in are_finite.items():
            if not is_finite():
                self._bad.add(microbatch)
                raise NotFiniteError(
                    f"the gradient of {name} that the next stage sent for microbatch {microbatch} is not "
                    "finite, so it is not applied; lower the learning rate or set pipeline.clip_norm"
                )

    def check_loss(self, microbatch: int, loss: float) -> None:
        if not math.isfinite(loss):
            raise NotFiniteError(
                f"the loss of microbatch {microbatch} is {loss}; lower the learning rate, "
                "set pipeline.clip_norm, or check that microbatch's data"
            )

    def check_saved(self, tensors: Tensors, when: str) -> None:
        """Checks the parameters in a state to be saved; `when` names the last step before it, for the message."""
        for name, tensor in tensors.items():
            if name.startswith(("param:", "outer:")) and not torch.isfinite(tensor).all():
                raise NotFiniteError(
                    f"the parameter {name.partition(':')[2]} is not finite {when}, so it is not saved; "
                    "lower the learning rate or set pipeline.clip_norm"
                )

    def note_sent(self, microbatch: int, gradients: Tensors) -> None:
        """Starts checks of gradients that are about to be sent; their results are read only for a diagnosis."""
        self._sent[microbatch] = [start_reading(all_finite(g)) for g in gradients.values()]
        while len(self._sent) > _REMEMBERED:
            self._sent.pop(next(iter(self._sent)))

    def diagnose(self, graph: PortableGraph, microbatch: int, forward: ForwardDiagnosis | None) -> StageDiagnosis:
        """The stage's report about a microbatch whose loss or gradients are not finite; `forward` is None if the
        inputs of its forward are gone."""
        sent: State = ""
        received: State = ""
        if microbatch in self._bad:
            received = "nan"
        if microbatch in self._sent:
            if not received and graph.loss is None:
                # The gradients that arrived were checked before these were sent.
                received = "finite"
            sent = "finite" if all(is_finite() for is_finite in self._sent[microbatch]) else "nan"
        return StageDiagnosis(forward or ForwardDiagnosis(), received, sent, steep(graph))

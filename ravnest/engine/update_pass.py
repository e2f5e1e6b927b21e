"""Update of a stage's weights in one pass over memory, block by block (weights/blocks.py).

All that an update does to a block happens before the next block: the copy of the weights to new memory, if a microbatch
in flight still uses them; the mean and the clipping of the gradient; the optimizer's step with its correction; and the
prediction of the weights for the next forwards. The memory of a gradient becomes that of the predicted weights or of
the new version, and is freed otherwise, so an update needs no temporary tensor larger than a block.

Clipping by norm needs the norm of all gradients first, which reads them once more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ravnest.engine.corrections.correction import Correction
from ravnest.engine.weights.blocks import Ahead, Block, Blocks
from ravnest.engine.weights.frozen_state import FrozenStates
from ravnest.engine.weights.gradient_sum import GradientSum
from ravnest.engine.weights.packed_moments import FloatMoments, PackedMoments
from ravnest.engine.weights.versions import WeightVersions


@dataclass(frozen=True, slots=True)
class _Scaling:
    """Changes of the gradients that are left to do, in this order."""

    divisor: int = 1
    max_value: float | None = None
    factor: Tensor | None = None

    def apply(self, gradients: list[Tensor]) -> None:
        if not gradients:
            return
        if self.divisor > 1:
            torch._foreach_div_(gradients, self.divisor)
        if self.max_value is not None:
            torch._foreach_clamp_min_(gradients, -self.max_value)
            torch._foreach_clamp_max_(gradients, self.max_value)
        if self.factor is not None:
            torch._foreach_mul_(gradients, self.factor)


class UpdatePass:
    """Updates the weights of one stage."""

    def __init__(
        self,
        versions: WeightVersions,
        optimizer: Optimizer,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        block_bytes: int | None = None,
        moments: FloatMoments | PackedMoments | None = None,
        frozen: FrozenStates | None = None,
    ) -> None:
        """`block_bytes` replaces the size of a block, which follows from the device otherwise. `moments` are those of
        the optimizer, if it does not hold them in float32. `frozen`: states whose memory is saved before it is
        overwritten."""
        self._versions = versions
        self._frozen = FrozenStates() if frozen is None else frozen
        self._moments = FloatMoments() if moments is None else moments
        self._blocks = Blocks(optimizer, versions.masters, block_bytes)
        self._clip_norm = clip_norm
        self._clip_value = clip_value

    @torch.no_grad()
    def run(self, gradients: GradientSum, correction: Correction, options_ahead: Mapping[str, Any]) -> None:
        """Makes the next version of the weights from the mean of these gradients, which are used up.

        `options_ahead`: the options of the optimizer after this update, which the prediction of weights uses.
        """
        versions = self._versions
        versions.on_write()
        scaling = self._scaling(gradients)
        # The staleness of a mean of gradients is their mean staleness.
        version = versions.current.number
        correction.begin_update(version - gradients.mean_version, version)
        predicted: dict[str, Tensor] | None = {} if correction.predicts else None
        for group in self._blocks.groups:
            with self._moments.unpacked([versions.masters[name] for name in group], version):
                ahead = self._update(group, gradients, scaling, correction, options_ahead)
            if predicted is not None:
                predicted.update(ahead)
        if predicted is not None:
            predicted = {name: predicted[name].requires_grad_() for name in versions.masters}
        correction.end_update(predicted)
        versions.finish_update()

    def _update(
        self,
        group: Sequence[str],
        gradients: GradientSum,
        scaling: _Scaling,
        correction: Correction,
        options_ahead: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        """Updates the parameters of one group; returns their predicted weights, if the correction predicts any."""
        masters = {name: self._versions.masters[name] for name in group}
        before: dict[str, Tensor | None] = {}
        ahead: dict[str, Tensor] = {}
        for name, master in masters.items():
            gradient = gradients.tensors.pop(name, None)
            master.grad = None if gradient is None else gradient.contiguous()
            spare = _spare_memory(master)
            if correction.predicts:
                ahead[name] = torch.empty_like(master.detach()) if spare is None else spare
                spare = None
            before[name] = self._versions.renew(name, spare)
        for block in self._blocks.of(group):
            self._protect(block)
            for name, weights in zip(block.names, block.parameters, strict=True):
                source = before[name]
                if source is not None:
                    if weights.grad is not None and weights.grad.data_ptr() == weights.data_ptr():
                        weights.grad = weights.grad.clone()
                    weights.copy_(block.cut(source))
            scaling.apply([weights.grad for weights in block.parameters if weights.grad is not None])
            if ahead:
                block.ahead = Ahead([block.cut(ahead[name]) for name in block.names], options_ahead)
            correction.step(block)
        for master in masters.values():
            master.grad = None
        return ahead

    def _protect(self, block: Block) -> None:
        for weights in block.parameters:
            self._frozen.protect(weights)
        for state in block.states:
            for value in state.values():
                if isinstance(value, Tensor):
                    self._frozen.protect(value)

    def _scaling(self, gradients: GradientSum) -> _Scaling:
        scaling = _Scaling(gradients.divisor, self._clip_value)
        if self._clip_norm is None:
            return scaling
        # In the order of the masters: the order of a sum decides about its last digit.
        found = [gradients.tensors[name] for name in self._versions.masters if name in gradients.tensors]
        scaling.apply(found)
        factor = (self._clip_norm / (torch.nn.utils.get_total_norm(found) + 1e-6)).clamp(max=1.0)
        # Waiting for a GPU's answer would cost more than a multiplication by 1.
        return _Scaling(factor=None if factor.device.type == "cpu" and factor == 1 else factor)


def _spare_memory(parameter: Tensor) -> Tensor | None:
    """The memory of the parameter's gradient, which a step uses up, if it has the size and layout of the parameter."""
    gradient = parameter.grad
    if gradient is None or not parameter.is_contiguous() or gradient.dtype is not parameter.dtype:
        return None
    return gradient.detach() if gradient.untyped_storage().nbytes() == gradient.nbytes else None

"""Fingerprints of gradients, to compare two gradients without holding both.

A small tensor is its own fingerprint. The fingerprint of a large tensor is a count sketch: the sum of its rows with
random signs, which preserves the norm of the difference of two tensors. So the check of a large model needs a few
megabytes for each parameter instead of a second set of gradients.
"""

from dataclasses import dataclass
from typing import Final

import torch

_WHOLE: Final = 1 << 20
"""Maximum number of elements of a tensor that is kept whole."""
_WIDTH: Final = 1 << 16
_ROWS_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Fingerprint of one tensor."""

    norm: float
    values: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Fingerprint":
        flat = tensor.detach().reshape(-1)
        norm = float(torch.linalg.vector_norm(flat, dtype=torch.float32 if flat.dtype.itemsize < 4 else None))
        return cls(norm, flat.clone() if flat.numel() <= _WHOLE else _sketch(flat))

    def distance(self, other: "Fingerprint") -> float:
        """Norm of the difference of the two tensors: exact for small tensors, an estimate for large ones."""
        difference = self.values.to(torch.promote_types(self.values.dtype, torch.float32)) - other.values
        if not self.is_finite and not other.is_finite:
            return 0.0
        return float(torch.linalg.vector_norm(difference))

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.values).all())


def _sketch(flat: torch.Tensor) -> torch.Tensor:
    rows = flat.numel() // _WIDTH
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (rows,), generator=generator).mul_(2).sub_(1).to(flat.device, torch.float32)
    main = flat[: rows * _WIDTH].view(rows, _WIDTH)
    total = torch.zeros(_WIDTH, device=flat.device)
    for start in range(0, rows, _ROWS_AT_ONCE):
        end = start + _ROWS_AT_ONCE
        total += signs[start:end] @ main[start:end].to(torch.float32)
    return torch.cat([total, flat[rows * _WIDTH :].to(torch.float32)])

"""Models whose first stage needs nothing of the batch: it computes on weights alone."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.models import Kind

Tensor = torch.Tensor


Norm = Callable[[nn.Module], nn.Module]


class Normed(nn.Module):
    """The weight of the first layer is computed before anything of the batch is looked at."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        # The old weight norm computes the weight here already, and a module with a computed weight cannot be copied.
        with torch.no_grad():
            self.first = norm(nn.Linear(8, 16))
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Prompted(nn.Module):
    """A learned prompt, made by a small network, in front of the embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.shaping = nn.Parameter(torch.randn(3, 8)), nn.Linear(8, 8)
        self.embedding, self.norm, self.head = nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        prompt, embedded = torch.tanh(self.shaping(self.prompt)), self.embedding(tokens)
        hidden = torch.cat([prompt.expand(tokens.shape[0], -1, -1), embedded], dim=1)
        hidden = F.scaled_dot_product_attention(hidden, hidden, hidden)
        return self.head(self.norm(hidden))[:, 3:]


class Alone(nn.Module):
    """Looks at nothing of the batch at all."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds, self.shaping, self.last = nn.Parameter(torch.randn(3, 8)), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, unused: Tensor) -> Tensor:
        return self.last(torch.tanh(self.shaping(self.seeds)))


def _distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - 1).square().mean()


def _vectors(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8), torch.randint(0, 4, (size,))


def _tokens(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 20, (size, 5)), torch.randint(0, 20, (size, 5))


def _token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


_normed = {
    "weight_norm": parametrizations.weight_norm,
    "old_weight_norm": nn.utils.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old_spectral_norm": nn.utils.spectral_norm,
}


MODELS: dict[str, tuple[Kind, str]] = {
    **{name: (Kind(partial(Normed, norm), _vectors, F.cross_entropy), "first.bias") for name, norm in _normed.items()},
    "alone": (Kind(Alone, _vectors, _distance), "last"),
    "prompt": (Kind(Prompted, _tokens, _token_loss), "embedding"),
}
"""Each with the parameter or module behind which nothing of the batch has been used yet."""

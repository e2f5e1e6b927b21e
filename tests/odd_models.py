"""Models that do what the zoo's do not: each holds something that once was, or easily could be, cut or run wrongly."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.models import Kind

Tensor = torch.Tensor


class ThreeLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.rest(self.a(x))

    def rest(self, hidden: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(hidden))))


class NormedWeights(ThreeLayers):
    """Spectral norm writes its estimates with `out=`, in training only; weight norm has an operator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = parametrizations.weight_norm(self.a), parametrizations.spectral_norm(self.b)


class OldSpectralNorm(ThreeLayers):
    """Takes a view of its parameter under no_grad, which claims to require a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.utils.spectral_norm(self.b)


class GradInsideNoGrad(ThreeLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.a(x)
            with torch.enable_grad():
                hidden = torch.tanh(self.b(hidden))
        return self.c(hidden)


class WritesByKeyword(ThreeLayers):
    """The last mean goes into a buffer through `out=`."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if self.training:
            with torch.no_grad():
                torch.mean(hidden.detach(), 0, out=self.last)
        return self.rest(hidden - self.last)


class ParameterAsMetric(ThreeLayers):
    """What is returned beside the output, and taken as a metric, is a parameter: it must not be trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x) * self.scale, self.scale


class StateAsMetric(ThreeLayers):
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.a(x)
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(0.1 * hidden.mean())
        return self.rest(hidden), self.average


class OneNormTwice(ThreeLayers):
    """A batch norm that two layers share: its statistics must live in one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.norm(torch.tanh(self.b(self.norm(torch.tanh(self.a(x)))))))


class ViewOfBuffer(ThreeLayers):
    memory: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if self.training:
            self.memory[0] = hidden.detach().mean(0)
        first = self.memory[0]
        return self.rest(hidden - first) - first


class FrozenNorm(nn.BatchNorm1d):
    """As in detection models: in evaluation for good."""

    def train(self, mode: bool = True) -> "FrozenNorm":
        return super().train(False)


class Norms(ThreeLayers):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(
            [FrozenNorm(8), nn.BatchNorm1d(8, track_running_stats=False), nn.BatchNorm1d(8, affine=False)]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.norms[2](self.b(self.norms[1](self.norms[0](self.a(x))))))


class Drops(nn.Module):
    """Every kind of dropout there is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.drops = nn.Sequential(nn.Dropout2d(0.3), nn.FeatureAlphaDropout(0.2), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(64, 8), nn.AlphaDropout(0.2), nn.RReLU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drops(self.norm(self.conv(x))))


class Checkpointed(ThreeLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(checkpoint(lambda q: torch.tanh(self.b(torch.tanh(self.a(q)))), x, use_reentrant=False))


class OneLayerFourTimes(nn.Module):
    """ALBERT's idea: one layer all the way, and the embedding's transpose as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for _ in range(4):
            hidden = self.norm(hidden + torch.tanh(self.layer(hidden)))
        return hidden @ self.embedding.weight.T


class HiddenViews(ThreeLayers):
    """Writes into a view that its operator's schema does not announce as one."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        torch.einsum("ij->ji", hidden).add_(1.0)
        pieces = torch.broadcast_tensors(torch.tanh(self.b(hidden)), torch.ones(1, 8))
        return self.c(pieces[0] * pieces[1])


class FilledIn(ThreeLayers):
    """What two layers yield is written into one tensor of zeros, which needs no gradient until then."""

    def forward(self, x: Tensor) -> Tensor:
        filled = x.new_zeros(x.shape[0], 8)
        filled[:, :4] = self.a(x)[:, :4]
        filled[:, 4:] = self.b(x)[:, 4:]
        kept = torch.tanh(self.a(x))
        return self.c(filled + kept)


class ChangedUnderNoGrad(ThreeLayers):
    """What no_grad changes in place, or hands back as it is, still depends on what was trained before."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        with torch.no_grad():
            changed, view = hidden.mul_(0.5).contiguous(), hidden.view(-1, 8)
        return self.c(torch.tanh(self.b(changed)) + view)


class SameGradientTwice(ThreeLayers):
    """Two parameters whose gradient autograd gives as one tensor, and one whose gradient repeats a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.shift = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ (self.left + self.right)) + self.shift.sum()


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.inner(source, target, tgt_mask=mask, tgt_is_causal=True)


class ComplexMiddle(ThreeLayers):
    """Complex numbers, which do not travel, between the first layers and the last."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        turned = torch.polar(torch.sigmoid(hidden), self.b(hidden))
        return self.c((turned + turned * turned).abs())


def _vectors(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8), torch.randn(size, 8)


def _first(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return F.mse_loss(outputs[0], targets)


def _second(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return outputs[1]


def _tokens(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 20, (size, 6)), torch.randint(0, 20, (size, 6))


def _token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


_odd = partial(Kind, optimizer=partial(torch.optim.SGD, lr=0.05))

ODD: dict[str, Kind] = {
    **{
        kind.__name__: _odd(kind, _vectors, F.mse_loss)
        for kind in (
            *(NormedWeights, OldSpectralNorm, GradInsideNoGrad, WritesByKeyword, OneNormTwice, ViewOfBuffer, Norms),
            *(Checkpointed, HiddenViews, FilledIn, ChangedUnderNoGrad, SameGradientTwice, ComplexMiddle),
        )
    },
    "ParameterAsMetric": _odd(ParameterAsMetric, _vectors, _first, {"scale": _second}),
    "StateAsMetric": _odd(StateAsMetric, _vectors, _first, {"average": _second}),
    "Drops": _odd(Drops, lambda size: (torch.randn(size, 3, 6, 6), torch.randn(size, 8)), F.mse_loss),
    "OneLayerFourTimes": _odd(OneLayerFourTimes, _tokens, _token_loss),
    "Translator": _odd(
        Translator,
        lambda size: ((torch.randn(size, 5, 8), torch.randn(size, 4, 8)), torch.randn(size, 4, 8)),
        F.mse_loss,
    ),
}

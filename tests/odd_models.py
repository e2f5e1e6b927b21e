"""Models that do what the zoo's do not: each holds something that once was, or easily could be, cut or run wrongly."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
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
    """What no_grad changes in place, or hands back as it is, still depends on what was trained before; a view that is
    taken there leads nowhere."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        doubled = 2 * hidden
        with torch.no_grad():
            changed, view = hidden.mul_(0.5).contiguous(), hidden.view(-1, 8)
            first = doubled[:, 0].mul_(0.5)
        middle = torch.tanh(self.b(changed)) + view
        with torch.no_grad():
            level = first.mean()
        return self.c(middle) + level


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


class Reversed(torch.autograd.Function):
    """Gradient reversal: its gradient points the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradient, None


class Binarized(torch.autograd.Function):
    """Straight-through: a sign that has the gradient of the identity where it is not saturated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sign(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        passed = gradient.clone()
        passed[x.abs() > 1] = 0
        return passed


class ScaledInPlace(torch.autograd.Function):
    """Writes into the gradient it is given, and saves what it computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = x > 0
        ctx.save_for_backward(positive)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return gradient.mul_(positive).mul_(0.5)


class HalfLinear(torch.autograd.Function):
    """A product whose weight gets half its gradient, and only what is needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return x @ weight.t() if bias is None else x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        of_bias = gradient.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return of_x, 0.5 * gradient.t() @ x, of_bias


class Mixed(torch.autograd.Function):
    """Several outputs, one of them without a gradient, in the newer style."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return a * b, a > b, a + b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, product: Tensor, larger: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        a, b, result = ctx.saved_tensors
        return product * b + total + 0.1 * result, 2 * product * a - total


class OwnBackwards(ThreeLayers):
    """Custom backward passes of every kind, one behind the other, and one of them on a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.d, self.e = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = Reversed.apply(self.a(HalfLinear.apply(x, self.d.weight, self.d.bias)), 0.5)
        hidden = hidden + Binarized.apply(torch.tanh(hidden) * 1.5)
        product, larger, total = Mixed.apply(hidden, HalfLinear.apply(hidden, self.e.weight, self.e.bias))
        hidden = F.linear(torch.where(larger, product, total), Binarized.apply(self.b.weight), self.b.bias)
        hidden = ScaledInPlace.apply(hidden)
        hidden.mul_(0.3)
        return self.c(Reversed.apply(hidden, -2.0))


class Hooked(ThreeLayers):
    """Hooks that change gradients: on a parameter, on modules and on a value, two of them on the same."""

    def __init__(self) -> None:
        super().__init__()
        self.c.register_full_backward_hook(lambda module, into, out: tuple(0.9 * each for each in into))
        self.b.register_full_backward_hook(lambda module, into, out: (into[0].clamp(-1e-2, 1e-2),))
        self.b.register_full_backward_pre_hook(lambda module, out: (out[0] * 3.0,))
        self.c.bias.register_hook(lambda gradient: gradient * 0.5)
        self.c.bias.register_hook(lambda gradient: gradient + 0.01)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        again = torch.tanh(hidden)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient + 0.01)
            hidden.register_hook(lambda gradient: gradient * 2.0)
        return self.c(self.b(hidden) + again)


class DropsPaths(ThreeLayers):
    """Stochastic depth, written by hand in the two usual ways: off in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x + self._in_place(self.a(x))
        return self.c(hidden + self._divided(self.b(hidden)))

    def _in_place(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * x.new_empty((x.shape[0], 1)).bernoulli_(0.7).div_(0.7)

    def _divided(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = 0.7 + torch.rand((x.shape[0], 1), dtype=x.dtype, device=x.device)
        return x.div(0.7) * kept.floor_()


class TrainsOtherwise(ThreeLayers):
    """Another path in evaluation, which writes in place and has constants of its own; noise in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        if self.training:
            hidden = hidden + 0.1 * torch.randn_like(hidden)
            hidden.mul_(2.0)
        else:
            hidden.clamp_(-0.5, 0.5)
            hidden = torch.where(hidden > 0, hidden, torch.tensor(0.25))
        result = self.c(self.b(hidden))
        return result * 2 if self.training else result


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
            *(OwnBackwards, Hooked, DropsPaths, TrainsOtherwise),
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

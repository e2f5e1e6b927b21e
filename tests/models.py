"""The zoo: one small model of every kind Ravnest promises to train, each made fresh from a seed.

Sizes are chosen so that twenty updates take a fraction of a second, and every fifth batch is smaller than the others,
because a batch's size must stay free through capture and cut.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor
ADAMW = partial(torch.optim.AdamW, lr=2e-3)


@dataclass(frozen=True)
class Made:
    """A model with its loss, metrics and batches; nothing of it is shared with another one."""

    model: nn.Module
    loss: Callable[..., Tensor]
    metrics: Mapping[str, Callable[..., Tensor]]
    batches: list[tuple[Any, Any]]


@dataclass(frozen=True)
class Kind:
    """How to make one kind of model, and how it is trained when exactness is asked for."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, Any]]
    """A random batch of that many samples."""
    loss: Callable[..., Tensor]
    metrics: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)
    optimizer: Any = ADAMW
    schedule: Any = None
    accumulate: int = 1
    batch_size: int = 4

    def make(self, seed: int = 0, batches: int = 20) -> Made:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 + seed)
            model = self.build()
            sizes = [self.batch_size - (1 if i % 5 == 4 else 0) for i in range(batches)]
            return Made(model, self.loss, self.metrics, [self.batch(size) for size in sizes])


class ConvNet(nn.Module):
    """A CNN with batch norm and dropout; `inplace` makes activations overwrite what they are given."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(inplace), nn.MaxPool2d(2), nn.BatchNorm2d(6), nn.Dropout(0.25)),
            *(nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace), nn.MaxPool2d(2)),
            nn.Dropout(0.25, inplace),
        )
        self.classifier = nn.Sequential(
            *(nn.Flatten(), nn.Linear(32, 16), nn.ReLU(inplace), nn.BatchNorm1d(16), nn.Dropout(0.4)),
            nn.Linear(16, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


class ResidualBlock(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or width != out:
            self.shortcut = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResidualNet(nn.Module):
    """torchvision's ResNet in small: in-place additions and activations around every shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(ResidualBlock(6, 6, 1), ResidualBlock(6, 8, 2), ResidualBlock(8, 8, 1))
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        p = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.mlp(self.norm2(x)))


class TiedGPT(nn.Module):
    """A GPT whose head is its embedding: the first and the last stage use one weight."""

    def __init__(self, vocabulary: int = 32, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.ModuleList(GPTBlock(width, 2, 0.1) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """An LSTM or GRU of several layers, with dropout between them."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.first = kind(8, 12, num_layers=2, dropout=0.2, batch_first=True)
        self.second = kind(12, 10, batch_first=True, bidirectional=True)
        self.head = nn.Linear(20, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.first(self.embedding(tokens))
        hidden, _ = self.second(hidden)
        return self.head(hidden.mean(dim=1))


class UNet(nn.Module):
    """Three levels down and up again: what the first stage computes is needed by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._block(1, 4), self._block(4, 6), self._block(6, 8)])
        self.middle = self._block(8, 8)
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(8, 6, 2, 2), nn.ConvTranspose2d(6, 4, 2, 2)]
        )
        self.join = nn.ModuleList([self._block(16, 8), self._block(12, 6), self._block(8, 4)])
        self.head = nn.Conv2d(4, 1, 1)

    @staticmethod
    def _block(width: int, out: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.LeakyReLU(0.1, inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join, skip in zip(self.up, self.join, reversed(skips), strict=True):
            x = join(torch.cat([up(x), skip], dim=1))
        return self.head(x)


class TwoTowers(nn.Module):
    """Several inputs, one of them needed late."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(4, 8)
        self.joined, self.head = nn.Linear(16, 12), nn.Linear(16, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        both = torch.cat([torch.tanh(self.left(left)), torch.tanh(self.right(right))], dim=1)
        return self.head(torch.cat([torch.relu(self.joined(both)), right], dim=1))


class NamedInputs(TwoTowers):
    """The same by keyword, with a mask."""

    def forward(self, *, left: Tensor, right: Tensor, keep: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(left.masked_fill(~keep, 0.0), right) * keep.any(dim=1, keepdim=True)


class ManyOutputs(nn.Module):
    """Class scores, a reconstruction and a number of its first layer, of which the loss uses the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.between = nn.Linear(8, 12), nn.Linear(12, 12)
        self.scores, self.decoder = nn.Linear(12, 3), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = torch.tanh(self.encoder(x))
        activity = first.abs().mean()
        hidden = torch.tanh(self.between(first))
        return {"scores": self.scores(hidden), "again": self.decoder(hidden), "activity": activity}


class FrozenBackbone(nn.Module):
    """A backbone that is not trained (its batch norm still counts) under layers that are."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.backbone.requires_grad_(False)
        hidden = [nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU()]
        self.head = nn.Sequential(nn.Linear(256, 12), nn.ReLU(), *hidden, nn.Linear(12, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))


class SharedBuffer(nn.Module):
    """One buffer used by the first and the last layer, one that is no part of the state_dict, one never used."""

    scale: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(8) + 0.5)
        self.register_buffer("shift", torch.rand(8), persistent=False)
        self.register_buffer("unused", torch.arange(3))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) * self.scale + self.shift
        x = torch.tanh(self.layers[2](torch.tanh(self.layers[1](x))))
        return self.layers[3](x * self.scale - self.shift)


class InPlaceViews(nn.Module):
    """Writes into views of what it computed, into its input, and into a buffer it keeps count in."""

    calls: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0.0
        y = self.layers[0](x)
        y[:, 1] = 0.5
        y.add_(x)
        z = self.layers[1](y * 1.0)
        left, right = z[:, :4], z[:, 4:]
        left.mul_(0.5)
        right[:, 2:].zero_()
        if self.training:
            with torch.no_grad():
                self.calls += 1
                self.mean.mul_(0.9).add_(z.detach().mean(0), alpha=0.1)
        w = self.layers[2](torch.tanh(z))
        w.view(-1, 2, 4)[:, 0].sigmoid_()
        return self.layers[3](w - self.mean)


def _classes(count: int) -> Callable[[Tensor, Tensor], Tensor]:
    def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
        return (logits.argmax(dim=-1) == labels).float().mean()

    accuracy.__name__ = f"accuracy_of_{count}"
    return accuracy


def next_token_loss(outputs: Any, targets: Tensor) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def logits_loss(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits, targets)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32,
            n_positions=16,
            n_embd=16,
            n_layer=3,
            n_head=2,
            resid_pdrop=0.1,
            embd_pdrop=0.1,
            attn_pdrop=0.1,
        )
    )


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
        )
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3},
            **{"num_attention_heads": 2, "max_position_embeddings": 16, "num_labels": 3},
        )
    )


def _t5() -> nn.Module:
    """One embedding with three uses: by the encoder, by the decoder, and as the head."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            **{"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
            **{"tie_word_embeddings": True, "decoder_start_token_id": 0, "use_cache": False, "dropout_rate": 0.1},
        )
    )


def _albert() -> nn.Module:
    """One block that is used three times, and an embedding that is also the head."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    return AlbertForMaskedLM(
        AlbertConfig(
            **{"vocab_size": 32, "embedding_size": 8, "hidden_size": 16, "intermediate_size": 24},
            **{"num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 16},
        )
    )


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            **{"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24},
            **{"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 5},
            **{"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
        )
    )


def _images(classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda size: (torch.randn(size, 1, 8, 8), torch.randint(0, classes, (size,)))


def _tokens(size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 32, (size, 9))
    return tokens[:, :-1].clone(), tokens[:, 1:].clone()


def _token_dict(size: int) -> tuple[dict[str, Tensor], Tensor]:
    tokens, targets = _tokens(size)
    return {"input_ids": tokens}, targets


def _two_token_lists(size: int) -> tuple[dict[str, Tensor], Tensor]:
    tokens, targets = _tokens(size)
    return {"input_ids": tokens, "decoder_input_ids": torch.randint(0, 32, (size, 8))}, targets


def _masked(size: int) -> tuple[dict[str, Tensor], Tensor]:
    mask = torch.ones(size, 8, dtype=torch.int64)
    for row in range(size):
        mask[row, 8 - row % 4 :] = 0
    tokens = torch.randint(0, 32, (size, 8))
    kinds = (torch.arange(8) >= 4).long().expand(size, 8).contiguous()
    return {"input_ids": tokens, "attention_mask": mask, "token_type_ids": kinds}, torch.randint(0, 3, (size,))


def _named(size: int) -> tuple[dict[str, Tensor], Tensor]:
    keep = torch.rand(size, 6) > 0.3
    return {"left": torch.randn(size, 6), "right": torch.randn(size, 4), "keep": keep}, torch.randint(0, 3, (size,))


def _several(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8), torch.randint(0, 3, (size,))


def _two_part_loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs["scores"], targets) + 0.1 * outputs["again"].square().mean()


_MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
_COSINE = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=20)

ZOO: dict[str, Kind] = {
    "cnn": Kind(ConvNet, _images(10), F.cross_entropy, {"accuracy": _classes(10)}, schedule=_COSINE),
    "cnn_inplace": Kind(partial(ConvNet, inplace=True), _images(10), F.cross_entropy, optimizer=_MOMENTUM),
    "resnet": Kind(ResidualNet, _images(10), F.cross_entropy, optimizer=_MOMENTUM, schedule=_COSINE),
    "gpt_tied": Kind(TiedGPT, _tokens, next_token_loss, accumulate=2),
    "hf_gpt2": Kind(_gpt2, _token_dict, next_token_loss),
    # Traced, transformers gives Llama's attention a mask; run plainly, a flag that picks another kernel. The two agree
    # to rounding, and Adam makes a whole step of a gradient that is nothing but rounding: eps keeps such steps small.
    "hf_llama": Kind(
        _llama,
        _token_dict,
        next_token_loss,
        optimizer=partial(torch.optim.AdamW, lr=2e-3, eps=1e-3),
        schedule=_COSINE,
    ),
    "hf_bert": Kind(_bert, _masked, logits_loss),
    # Adam makes a whole step of a gradient that is nothing but rounding.
    "hf_t5": Kind(_t5, _two_token_lists, next_token_loss, optimizer=_MOMENTUM),
    "hf_albert": Kind(_albert, _token_dict, next_token_loss, optimizer=_MOMENTUM),
    "hf_vit": Kind(_vit, _images(5), logits_loss, accumulate=2),
    "lstm": Kind(
        partial(Recurrent, nn.LSTM),
        lambda n: (torch.randint(0, 20, (n, 7)), torch.randint(0, 5, (n,))),
        F.cross_entropy,
    ),
    "gru": Kind(
        partial(Recurrent, nn.GRU),
        lambda n: (torch.randint(0, 20, (n, 7)), torch.randint(0, 5, (n,))),
        F.cross_entropy,
        optimizer=_MOMENTUM,
    ),
    "unet": Kind(UNet, lambda n: (torch.randn(n, 1, 8, 8), torch.randn(n, 1, 8, 8)), F.mse_loss, schedule=_COSINE),
    "tuple_inputs": Kind(
        TwoTowers,
        lambda n: ((torch.randn(n, 6), torch.randn(n, 4)), torch.randint(0, 3, (n,))),
        F.cross_entropy,
        accumulate=2,
    ),
    "dict_inputs": Kind(NamedInputs, _named, F.cross_entropy),
    "many_outputs": Kind(
        ManyOutputs, _several, _two_part_loss, {"activity": lambda outputs, targets: outputs["activity"]}
    ),
    "frozen": Kind(FrozenBackbone, _images(10), F.cross_entropy),
    "shared_buffer": Kind(SharedBuffer, lambda n: (torch.randn(n, 8), torch.randn(n, 8)), F.mse_loss, schedule=_COSINE),
    "in_place": Kind(InPlaceViews, lambda n: (torch.randn(n, 8), torch.randn(n, 8)), F.mse_loss, optimizer=_MOMENTUM),
}

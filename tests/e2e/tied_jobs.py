"""A small model with a tied embedding, and batches of tokens for it: the leaf looks rows up for the root."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.e2e.jobs import Batch

VOCABULARY, WIDTH = 40, 16


class TiedModel(nn.Module):
    """Predicts the next of a few tokens; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return F.linear(hidden, self.embedding.weight)


class SteepRows(TiedModel):
    """Takes the square root of 0 of the rows: finite itself, and the gradient of the rows is not."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        hidden = hidden + (0 * hidden).sqrt()
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return F.linear(hidden, self.embedding.weight)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def a_tied_model(kind: type[TiedModel] = TiedModel) -> TiedModel:
    torch.manual_seed(3)
    return kind()


def token_batch(seed: int) -> Batch:
    tokens = torch.randint(0, VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].clone(), (tokens[:, :-1] * 3 % VOCABULARY).clone()

"""A small convolutional network on scikit-learn's handwritten digits: 1,797 grey images of 8 by 8 pixels.

    ravnest train examples/digits/job.py --providers 3

reaches about 0.98 accuracy on images it has not seen.
"""

from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ravnest

SEED = 42


class Net(nn.Module):
    """Two convolution blocks and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(16),
            nn.Dropout(0.25),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(32),
            nn.Dropout(0.25),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(32 * 2 * 2, 256),
            nn.ReLU(),
            nn.BatchNorm1d(256),
            nn.Dropout(0.4),
            nn.Linear(256, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(dim=1) == labels).float().mean()


def data() -> tuple[TensorDataset, TensorDataset]:
    """Four fifths of the images to train on, one fifth to evaluate on, every digit in the same proportion."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, held_out = train_test_split(torch.arange(len(labels)), test_size=0.2, stratify=labels, random_state=SEED)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


torch.manual_seed(SEED)
train_set, eval_set = data()

job = ravnest.Job(
    model=Net(),
    loss=F.cross_entropy,
    metrics={"accuracy": accuracy},
    # A last batch of a few images gives batch norm poor statistics; other epochs' shuffles cover them.
    train_data=DataLoader(
        train_set, batch_size=64, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(SEED)
    ),
    eval_data=DataLoader(eval_set, batch_size=64),
    optimizer=partial(torch.optim.AdamW, lr=2e-3),
    epochs=20,
    seed=SEED,
)

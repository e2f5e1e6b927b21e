"""Cost profiles in the shapes of well-known models: where their parameters, activations and traffic are."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ravnest.planner.model_costs import ModelCosts


@dataclass(frozen=True, slots=True)
class Part:
    """Some operators of a model, and the place after them."""

    seconds: float
    parameter_bytes: float
    saved_bytes: float
    crossing_bytes: float
    """One way, at the place after it."""
    depth: int = 0
    """Modules around that place."""


def profile(parts: Sequence[Part], samples: int = 8) -> ModelCosts:
    """The costs of a model of these parts, each with a trained parameter."""

    def sums(values: Sequence[float]) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(values)])

    crossing = np.array([0.0, *(part.crossing_bytes for part in parts[:-1]), 0.0])
    seconds = sums([part.seconds for part in parts])
    ends = np.zeros((2, len(parts) + 1))
    ends[0, 1:] = 1.0
    ends[1, -1] = 1.0
    return ModelCosts(
        places=tuple(range(len(parts) + 1)),
        heavy_seconds=0.9 * seconds,
        light_seconds=0.1 * seconds,
        heavy_forward_seconds=0.3 * seconds,
        light_forward_seconds=0.03 * seconds,
        parameter_bytes=sums([part.parameter_bytes for part in parts]),
        parameters=np.arange(len(parts) + 1, dtype=float),
        saved_bytes=sums([part.saved_bytes for part in parts]),
        forward_bytes=crossing,
        backward_bytes=crossing.copy(),
        input_bytes=(1000.0, 100.0),
        input_uses=ends,
        samples=samples,
        module_depth=np.array([0.0, *(part.depth for part in parts[:-1]), 0.0]),
    )


def transformer(blocks: int, *, vocabulary_bytes: float, block_bytes: float = 28e6, hidden: float = 4e5) -> ModelCosts:
    """An embedding, blocks of four parts each, and a head as large as the embedding.

    A block may be cut between attention and feed-forward network for as many bytes as between blocks, and inside each
    half for more.
    """
    parts = [Part(0.002, vocabulary_bytes, hidden, hidden, 0)]
    for _ in range(blocks):
        parts += [
            Part(0.012, block_bytes / 4, 4 * hidden, 4 * hidden, 2),
            Part(0.006, block_bytes / 12, 2 * hidden, hidden, 2),
            Part(0.016, block_bytes / 3, 8 * hidden, 5 * hidden, 3),
            Part(0.016, block_bytes / 3, 2 * hidden, hidden, 1),
        ]
    return profile([*parts, Part(vocabulary_bytes / 3e9, vocabulary_bytes, 10 * hidden, 0.0)])


def residual_network() -> ModelCosts:
    """Like ResNet-50: the activations shrink and the parameters grow from block to block."""
    parts = [Part(0.02, 4e4, 3e7, 8e6, 0)]
    for stage, blocks in enumerate((3, 4, 6, 3)):
        crossing, owned = 16e6 / 2**stage, 2.8e5 * 4**stage
        for block in range(blocks):
            parts += [Part(0.006, owned / 4, 2 * crossing, 1.25 * crossing, 2) for _ in range(2)]
            parts.append(Part(0.008, owned / 2, 2 * crossing, crossing, 1 if block < blocks - 1 else 0))
    return profile([*parts, Part(0.002, 8e6, 1e5, 0.0)], samples=32)


def recommender() -> ModelCosts:
    """A large embedding, and a small network behind it."""
    layers = [Part(0.003, 2e6, 2e5, 2e5, 1) for _ in range(4)]
    return profile([Part(0.01, 3e8, 2e5, 1e5, 0), *layers, Part(0.002, 1e6, 1e5, 0.0)], samples=64)

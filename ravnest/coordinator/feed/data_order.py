"""Data order: the same for the same epoch of the same job, in a new run and in a resumed one."""

import base64
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ravnest.errors import RunError


def seed_everything(seed: int, epoch: int) -> None:
    """Seeds the global generators, for data that shuffles without a generator of its own."""
    mixed = (seed * 1_000_003 + epoch) % 2**32
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def begin_epoch(data: Any, epoch: int) -> None:
    """Tells the data which epoch begins, as a plain training loop does with `set_epoch`."""
    for part in _parts(data):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)


def data_state(data: Any) -> str:
    """The state of the random generators that the data was given (`DataLoader(generator=...)`), as text."""
    return ",".join(base64.b64encode(g.get_state().numpy().tobytes()).decode() for g in _generators(data))


def set_data_state(data: Any, state: str) -> None:
    """Restores the state from `data_state`; a state of other data is ignored. RunError for a damaged state."""
    generators = _generators(data)
    texts = state.split(",") if state else []
    if len(texts) != len(generators):
        return
    for generator, text in zip(generators, texts, strict=True):
        try:
            saved = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
            if len(saved) == generator.get_state().numel():
                generator.set_state(torch.from_numpy(saved.copy()))
        except (ValueError, RuntimeError) as error:
            raise RunError(f"the checkpoint's state of the data's order cannot be used: {error}") from None


def epoch_size(data: Any, batch_samples: int) -> tuple[int, int] | None:
    """Batches and samples in an epoch; None if the data does not tell."""
    try:
        batches = len(data)
        samples = batches * batch_samples
        # The last batch of a loader may be smaller.
        if isinstance(getattr(data, "batch_size", None), int):
            samples = min(samples, len(data.sampler))
    except (TypeError, NotImplementedError):
        return None
    return batches, samples


def _generators(data: Any) -> list[torch.Generator]:
    found: list[torch.Generator] = []
    for part in _parts(data):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in found):
            found.append(generator)
    return found


def _parts(data: Any) -> Iterator[Any]:
    """The data itself and the objects from which a DataLoader takes its order."""
    yield data
    batch_sampler = getattr(data, "batch_sampler", None)
    for part in (getattr(data, "dataset", None), getattr(data, "sampler", None), batch_sampler):
        if part is not None:
            yield part
    sampler = getattr(batch_sampler, "sampler", None)
    if sampler is not None and sampler is not getattr(data, "sampler", None):
        yield sampler

"""Artifact: bytes that the coordinator offers to its providers, by name and hash."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Artifact:
    """Bytes that a provider fetches. `open` reads them from an offset on."""

    id: str
    sha256: str
    size_bytes: int
    open: Callable[[int], Iterator[bytes]]

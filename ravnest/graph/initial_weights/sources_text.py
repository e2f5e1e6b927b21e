"""List of the tensors of a weights stream: the hash of each and, if there is one, its recipe. JSON, as an artifact."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ravnest.errors import GraphError
from ravnest.graph.initial_weights.find_initial import InitialWeight
from ravnest.graph.initial_weights.recipe import Recipe
from ravnest.graph.weights import MAX_HEADER_VALUES, TensorEntry, read_header
from ravnest.safe_json import read_json

MAX_SOURCES_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class ListedTensor:
    """One tensor of the stream."""

    entry: TensorEntry
    sha256: str
    recipe: Recipe | None


@dataclass(frozen=True, slots=True)
class WeightSources:
    """Description of a stream, which its receiver has before the stream."""

    header: bytes
    """The first bytes of the stream."""
    tensors: tuple[ListedTensor, ...]
    """In the order of the stream."""


def sources_text(header: bytes, initial: Mapping[str, InitialWeight]) -> bytes:
    """The list of a stream with this header, by the names of its tensors."""
    tensors = {
        name: {"sha256": known.sha256, "recipe": None if known.recipe is None else known.recipe.to_json()}
        for name, known in initial.items()
    }
    return json.dumps({"header": header[8:].decode(), "tensors": tensors}, separators=(",", ":")).encode()


def read_sources(text: bytes, size_bytes: int) -> WeightSources:
    """The list of a stream of `size_bytes`; GraphError for any disagreement."""
    try:
        value = read_json(text, MAX_HEADER_VALUES)
    except ValueError as error:
        raise GraphError(f"the list of a stage's weights is not valid JSON: {error}") from None
    if not isinstance(value, dict) or value.keys() != {"header", "tensors"}:
        raise GraphError("the list of a stage's weights does not consist of header and tensors")
    described, tensors = value["header"], value["tensors"]
    if not isinstance(described, str) or not isinstance(tensors, dict):
        raise GraphError("the list of a stage's weights has no header or no tensors")
    encoded = described.encode()
    header = len(encoded).to_bytes(8, "little") + encoded
    entries = read_header(header, size_bytes)
    if tensors.keys() != {entry.name for entry in entries}:
        raise GraphError("the list of a stage's weights names other tensors than its header")
    return WeightSources(header, tuple(_listed(entry, tensors[entry.name]) for entry in entries))


def _listed(entry: TensorEntry, value: object) -> ListedTensor:
    if not isinstance(value, dict) or value.keys() != {"sha256", "recipe"}:
        raise GraphError(f"the tensor {entry.name!r} is not listed with sha256 and recipe")
    sha256, recipe = value["sha256"], value["recipe"]
    if not isinstance(sha256, str) or re.fullmatch("[0-9a-f]{64}", sha256) is None:
        raise GraphError(f"the tensor {entry.name!r} is listed without a sha256")
    return ListedTensor(entry, sha256, None if recipe is None else Recipe.from_json(recipe))

"""Weights in safetensors files on this machine: in folders that the owner named, or in the Hugging Face cache.

A coordinator asks for a tensor by name, shape, type and hash, and never names a file. Only regular files below the
folders are opened, and only for reading; a link that leads out of its folder is not followed. A tensor is used only if
its hash is the one asked for. A file that cannot be read is left out.

Each tensor is hashed once in a session while its file does not change, and one deployment causes a bounded number of
bytes to be hashed, so a coordinator cannot keep the disk busy with questions.
"""

import hashlib
import itertools
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ravnest.errors import GraphError, printable
from ravnest.graph.initial_weights.sources_text import ListedTensor
from ravnest.graph.weights import MAX_HEADER_BYTES, read_header

_MAX_FILES: Final = 10_000
_MAX_TRIED: Final = 8
"""Maximum number of tensors of other files that are hashed for one that is asked for."""
_MAX_HASHED_SHARE: Final = 4
"""Maximum bytes that one deployment causes to be hashed, as a multiple of the bytes that it asks for."""
_MAX_HASHES: Final = 100_000
"""Maximum number of hashes in memory: about as many tensors as the largest caches of models have."""

Kind = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    path: Path
    name: str
    offset: int
    size_bytes: int


_Place = tuple[Path, int, int, int, int]
"""Path, size and time of change of a file, and offset and size of a tensor in it."""


def huggingface_folder() -> Path | None:
    """The folder of models that Hugging Face has downloaded for this user; None if there is none."""
    for name, below in (("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")):
        if given := os.environ.get(name):
            folder = Path(given) / below
            break
    else:
        try:
            folder = Path.home() / ".cache" / "huggingface" / "hub"
        except RuntimeError:
            return None
    return folder if folder.is_dir() else None


def searched_text(folders: Sequence[Path]) -> str:
    """A line for the user of this machine: what a requester may have looked for."""
    where = ", ".join(printable(str(folder)) for folder in folders)
    return f"weights that a run asks for by their hash are looked for in {where} (--weights none switches this off)"


class LocalWeights:
    """The tensors of all safetensors files in these folders, for one session. The files are listed at the first
    search."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._stored: dict[Kind, list[_StoredTensor]] | None = None
        self._hashes: dict[_Place, str] = {}

    def search(self, asked_bytes: int) -> "LocalSearch":
        """A search for the tensors of one deployment, of this size together."""
        return LocalSearch(self, _MAX_HASHED_SHARE * asked_bytes)

    def candidates(self, tensor: ListedTensor) -> Iterator[_StoredTensor]:
        """The tensors that may be the listed one."""
        if self._stored is None:
            self._stored = self._listed()
        entry = tensor.entry
        key = entry.name.partition(":")[2]
        same = (each for each in self._stored.get((entry.dtype, entry.shape), ()) if _is_same(key, each.name))
        return itertools.islice(same, _MAX_TRIED)

    def known_hash(self, stored: _StoredTensor) -> str:
        """The sha256 of a tensor whose file has not changed since it was hashed; empty if it is not known."""
        place = _place(stored)
        return "" if place is None else self._hashes.get(place, "")

    def remember(self, stored: _StoredTensor, sha256: str) -> None:
        """Keep the sha256 of a tensor for the session."""
        if len(self._hashes) < _MAX_HASHES and (place := _place(stored)) is not None:
            self._hashes[place] = sha256

    def _listed(self) -> dict[Kind, list[_StoredTensor]]:
        found: dict[Kind, list[_StoredTensor]] = {}
        seen: set[Path] = set()
        for folder in self._folders:
            for path in _files_below(folder):
                if path in seen or len(seen) == _MAX_FILES:
                    continue
                seen.add(path)
                for kind, stored in _tensors_of(path):
                    found.setdefault(kind, []).append(stored)
        return found


class LocalSearch:
    """The search for the tensors of one deployment. It hashes a bounded number of bytes."""

    def __init__(self, weights: LocalWeights, max_hashed_bytes: int) -> None:
        self._weights = weights
        self._left_bytes = max_hashed_bytes

    def find(self, tensor: ListedTensor) -> memoryview | None:
        """The bytes of a tensor whose hash is the listed one; None if no file has it. Blocks while it reads."""
        for stored in self._weights.candidates(tensor):
            known = self._weights.known_hash(stored)
            if known and known != tensor.sha256:
                continue
            if stored.size_bytes > self._left_bytes:
                return None
            self._left_bytes -= stored.size_bytes
            data = _read(stored)
            if data is None:
                continue
            found = hashlib.sha256(data).hexdigest()
            self._weights.remember(stored, found)
            if found == tensor.sha256:
                return memoryview(data)
        return None


def _place(stored: _StoredTensor) -> _Place | None:
    """Identity of the bytes of a tensor, as long as its file does not change; None if the file cannot be read."""
    try:
        state = stored.path.stat(follow_symlinks=False)
    except OSError:
        return None
    return stored.path, state.st_size, state.st_mtime_ns, stored.offset, stored.size_bytes


def _is_same(key: str, name: str) -> bool:
    """Whether two names may be of one tensor: models add prefixes such as "transformer." to the names of a file."""
    return key == name or key.endswith(f".{name}") or name.endswith(f".{key}")


def _files_below(folder: Path) -> Iterator[Path]:
    """The real paths of the safetensors files in a folder."""
    try:
        root = folder.resolve(strict=True)
    except (OSError, RuntimeError):
        return
    for parent, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".safetensors"):
                try:
                    # The Hugging Face cache links from the names of a version to files of the same folder.
                    path = Path(parent, name).resolve(strict=True)
                except (OSError, RuntimeError):
                    continue
                if path.is_relative_to(root):
                    yield path


def _open(path: Path) -> int | None:
    """A descriptor for reading a regular file; None for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def _tensors_of(path: Path) -> Iterator[tuple[Kind, _StoredTensor]]:
    descriptor = _open(path)
    if descriptor is None:
        return
    try:
        size_bytes = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if length > min(MAX_HEADER_BYTES, size_bytes):
            return
        header = os.pread(descriptor, 8 + length, 0)
        entries = read_header(header, size_bytes)
    except (OSError, GraphError):
        return
    finally:
        os.close(descriptor)
    for entry in entries:
        stored = _StoredTensor(path, entry.name, len(header) + entry.begin, entry.end - entry.begin)
        yield (entry.dtype, entry.shape), stored


def _read(stored: _StoredTensor) -> bytearray | None:
    descriptor = _open(stored.path)
    if descriptor is None:
        return None
    try:
        data = bytearray(stored.size_bytes)
        view, done = memoryview(data), 0
        while done < len(data) and (count := os.preadv(descriptor, [view[done:]], stored.offset + done)):
            done += count
        return data if done == len(data) else None
    except OSError:
        return None
    finally:
        os.close(descriptor)

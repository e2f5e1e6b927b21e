"""Checkpoint reader: lists the checkpoints of a run, verifies every byte of them, and reads their tensors.

`checkpoints/<updates>/` holds one `part-<stage>.safetensors` per stage and `checkpoint.json`, the manifest with the
size and sha256 of each part. In a part, `param:<name>` and `buffer:<name>` are the stage's tensors under the user's own
names, `optim:<name>:<state>` is the optimizer's state of that parameter, `outer:<name>` the outer optimizer's, and the
metadata has plain values. The reader changes no file.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ravnest.errors import RunError
from ravnest.monitor.files import read_error
from ravnest.safe_json import read_json

FORMAT: Final = 1
MANIFEST_NAME: Final = "checkpoint.json"


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint on disk and its manifest."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def updates(self) -> int:
        return int(self.manifest["updates"])

    @property
    def samples(self) -> int:
        return int(self.manifest["samples"])

    @property
    def recorded_at(self) -> float | None:
        """When its state was recorded, in seconds since 1970; None in a checkpoint that does not say so."""
        at = self.manifest.get("created_at")
        return float(at) if isinstance(at, int | float) else None

    @property
    def epoch(self) -> int:
        return int(self.manifest["epoch"])

    @property
    def position(self) -> int:
        return int(self.manifest["position"])

    @property
    def state(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self.manifest["state"]
        return state


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A checkpoint that must not be used, and why."""

    folder: Path
    reason: str


@dataclass(frozen=True)
class CheckpointContents:
    """The tensors of a checkpoint by the user's own names; memory-mapped, so read only when they are used.

    A tied parameter, which several stages hold, comes from the first of them.
    """

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    outer: dict[str, Tensor] = field(default_factory=dict)
    metadata: list[dict[str, str]] = field(default_factory=list)
    manifest: Mapping[str, Any] = field(default_factory=dict)


def checkpoint_folders(folder: Path) -> list[Path]:
    """The committed checkpoints, newest first."""
    found = (path for path in folder.glob("*") if re.fullmatch(r"[0-9]{10,20}", path.name))
    return sorted(found, key=lambda path: int(path.name), reverse=True)


def newest_good(folder: Path) -> tuple[CheckpointInfo | None, list[DamagedCheckpoint]]:
    """The newest checkpoint in `folder` that verifies, and the newer ones that do not."""
    damaged: list[DamagedCheckpoint] = []
    for path in checkpoint_folders(folder):
        try:
            info = read_manifest(path)
            _verify(info)
        except RunError as error:
            damaged.append(DamagedCheckpoint(path, str(error)))
            continue
        return info, damaged
    return None, damaged


def find_checkpoint(folder: Path, updates: int) -> CheckpointInfo:
    """The checkpoint after `updates` updates; RunError when it is not there or damaged."""
    path = folder / f"{updates:010d}"
    if not path.is_dir():
        there = ", ".join(str(int(other.name)) for other in checkpoint_folders(folder)) or "none"
        raise RunError(f"there is no checkpoint {updates} in {folder}; there are: {there}.")
    info = read_manifest(path)
    _verify(info)
    return info


def load_checkpoint(info: CheckpointInfo) -> CheckpointContents:
    """The tensors of a verified checkpoint; RunError when a part is not in the format."""
    contents = CheckpointContents(manifest=info.manifest)
    for part in info.manifest["parts"]:
        path = info.folder / part["file"]
        try:
            with safe_open(path, framework="pt") as file:
                contents.metadata.append(dict(file.metadata() or {}))
                for key in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                    _put(contents, key, file.get_tensor(key))
        except (SafetensorError, OSError, ValueError) as error:
            raise RunError(f"{path} cannot be read as part of a checkpoint: {str(error)[:300]}.") from error
    return contents


def _put(contents: CheckpointContents, key: str, tensor: Tensor) -> None:
    kind, _, name = key.partition(":")
    if kind == "param":
        contents.parameters.setdefault(name, tensor)
    elif kind == "buffer":
        contents.buffers.setdefault(name, tensor)
    elif kind == "outer":
        contents.outer.setdefault(name, tensor)
    elif kind == "optim" and ":" in name:
        name, _, state_name = name.rpartition(":")
        contents.optimizer.setdefault(name, {}).setdefault(state_name, tensor)
    elif kind != "anchor":
        # A replica saved as a checkpoint has the anchors of its cluster's rings, which a resumed run does not use.
        raise ValueError(f"it holds the unknown entry {key!r}")


def read_manifest(folder: Path) -> CheckpointInfo:
    """The checkpoint in `folder` by its manifest; RunError when that is damaged. Its parts are not verified."""
    path = folder / MANIFEST_NAME
    try:
        manifest = read_json(path.read_bytes())
        if manifest["format"] != FORMAT:
            raise RunError(f"{path} is of format {manifest['format']}, this Ravnest reads format {FORMAT}; update it.")
        for name in ("checkpoint", "updates", "samples", "epoch", "position"):
            _check_count(name, manifest[name])
        if not isinstance(manifest["state"], dict) or not isinstance(manifest["ledger"], dict):
            raise ValueError("state and ledger must be objects")
        for part in manifest["parts"]:
            if not re.fullmatch(r"part-\d{1,9}\.safetensors", part["file"], re.ASCII):
                raise ValueError(f"{part['file'][:80]!r} is no name of a part")
            _check_count("size", part["size"])
            if not isinstance(part["sha256"], str):
                raise ValueError("a part has no sha256")
        if not manifest["parts"]:
            raise ValueError("it has no parts")
    except OSError as error:
        raise read_error(path, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged: {type(error).__name__} {error}.") from None
    return CheckpointInfo(folder, manifest)


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{name} is not a number of something")


def _verify(info: CheckpointInfo) -> None:
    for part in info.manifest["parts"]:
        path = info.folder / part["file"]
        try:
            size = path.stat().st_size
            if size != part["size"]:
                raise RunError(f"{path} is damaged: it has {size} bytes, {part['size']} were written.")
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise read_error(path, error) from error
        if digest != part["sha256"]:
            raise RunError(f"{path} is damaged: its content is not what was written (sha256 differs).")

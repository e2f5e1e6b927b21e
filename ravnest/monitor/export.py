"""Fused model: the tensors of all stages in one file, under the names of the user's own state_dict."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ravnest.errors import RunError
from ravnest.monitor.files import replacing

if TYPE_CHECKING:
    from torch import Tensor


class TrainedTensors(Protocol):
    """The part of a checkpoint that `fuse` reads."""

    @property
    def parameters(self) -> "Mapping[str, Tensor]": ...

    @property
    def buffers(self) -> "Mapping[str, Tensor]": ...


def fuse(
    contents: TrainedTensors,
    aliases: Mapping[str, str],
    extra: "Mapping[str, Tensor]",
    non_persistent: Collection[str] = (),
) -> "dict[str, Tensor]":
    """A state_dict that the user's model loads with `load_state_dict`.

    `aliases` maps each further name of a tied tensor to its owner's name; each name gets a copy, because a
    safetensors file cannot share a tensor between names. `extra` are tensors that no stage held; trained tensors take
    precedence. Names in `non_persistent` do not belong to a state_dict and are left out. Raises RunError if an owner is
    missing.
    """
    fused = {**extra, **contents.buffers, **contents.parameters}
    for name, owner in aliases.items():
        if owner not in fused:
            raise RunError(f"the checkpoint lacks {owner!r}, which {name!r} is tied to; export another checkpoint")
        fused[name] = fused[owner].clone()
    return {name: tensor for name, tensor in sorted(fused.items()) if name not in non_persistent}


def write_model(path: Path, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file atomically; raises RunError and leaves `path` unchanged if the disk fails."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with replacing(path) as temporary:
        mode = temporary.stat().st_mode
        try:
            save_file(
                {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
                temporary,
                metadata={"format": "pt", **(metadata or {})},
            )
            # The library makes its files readable by their owner only; the model gets the mode of the other files.
            temporary.chmod(mode)
        except SafetensorError as error:
            # The library reports disk errors as text only.
            reason = "the disk is full" if "os error 28" in str(error) else str(error)
            raise RunError(f"cannot write {path}: {reason}; free some space or choose another place") from error

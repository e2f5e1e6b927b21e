"""The fused model: the stages' tensors put together again under the names of the user's own state_dict."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ravnest.errors import RunError
from ravnest.monitor.files import replacing

if TYPE_CHECKING:
    from torch import Tensor


class TrainedTensors(Protocol):
    """What `fuse` needs to know of a checkpoint."""

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

    `aliases` gives each further name of a tied tensor its owner's name; each name gets a tensor of its own,
    because a safetensors file cannot share one. `extra` are tensors that no stage held; what was trained
    wins over them. Names in `non_persistent` are no part of a state_dict and are left out. RunError when an
    owner is missing.
    """
    fused = {**extra, **contents.buffers, **contents.parameters}
    for name, owner in aliases.items():
        if owner not in fused:
            raise RunError(f"the checkpoint lacks {owner!r}, which {name!r} is tied to; export another checkpoint.")
        fused[name] = fused[owner].clone()
    return {name: tensor for name, tensor in sorted(fused.items()) if name not in non_persistent}


def write_model(path: Path, tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file in one step; RunError when the disk refuses, and then `path` is as it was."""
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
            # The library lets nobody but the owner read its files; a model is as open as everything else in the run.
            temporary.chmod(mode)
        except SafetensorError as error:
            # The library tells what the disk said as text alone.
            reason = "the disk is full" if "os error 28" in str(error) else str(error)
            raise RunError(f"cannot write {path}: {reason}; free some space or choose another place.") from error

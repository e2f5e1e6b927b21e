"""Choice of the device that a provider computes on."""

import torch

from ravnest.errors import PeerError


def choose_device(wanted: str) -> torch.device:
    """The device for this option; `auto` prefers a GPU. PeerError when the device does not exist here."""
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda:0")
        if torch.backends.mps.is_available():
            return torch.device("mps")
        return torch.device("cpu")
    try:
        device = torch.device(wanted)
        reason = _missing(device)
        if not reason:
            device = _exactly(device)
            torch.zeros(1, device=device)
            return device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
    raise PeerError(f"device {wanted!r} cannot be used here ({reason}); use --device cpu or --device auto")


def _missing(device: torch.device) -> str:
    """Why there is no such device; empty when there may be one."""
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if torch.version.cuda is None and torch.version.hip is None:
            return "this PyTorch build has no GPU support"
        if not count:
            return "there is no GPU that PyTorch can use; check the driver with nvidia-smi"
        if (device.index or 0) >= count:
            return "there is one GPU here, cuda:0" if count == 1 else f"there are cuda:0 to cuda:{count - 1}"
    elif device.type == "mps":
        if not torch.backends.mps.is_available():
            return "there is no Apple GPU that PyTorch can use"
    elif device.type != "cpu":
        return "a provider computes on cpu, cuda:N or mps"
    return ""


def _exactly(device: torch.device) -> torch.device:
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else torch.device(device.type)

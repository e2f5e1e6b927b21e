"""Which device a provider computes on."""

import torch

from ravnest.errors import PeerError


def choose_device(wanted: str) -> torch.device:
    """`auto` takes a GPU where there is one; PeerError when the device asked for is not here."""
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda:0")
        if torch.backends.mps.is_available():
            return torch.device("mps")
        return torch.device("cpu")
    try:
        device = torch.device(wanted)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda:0")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PeerError(
            f"device {wanted!r} cannot be used here ({reason}); use --device cpu or --device auto"
        ) from None
    return device

"""Ravnest trains one PyTorch model across many ordinary, unequal machines; none holds the whole model.

The names below are the public API. They are imported on first use, so that `import ravnest` is cheap and the command
line answers `--help` without waiting for torch.

May know nothing of its packages at import time; the modules next to this one know the job and its settings, the errors,
and plain helpers that every package uses.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ravnest.errors import (
    CaptureError,
    DiskFullError,
    GraphError,
    JobError,
    PeerError,
    PlanError,
    RavnestError,
    RefusedError,
    RunError,
    TrainingError,
)

if TYPE_CHECKING:
    from ravnest.coordinator.launch.session import TrainResult
    from ravnest.job import Job
    from ravnest.settings import Averaging, Checkpoint, Pipeline

__version__ = "0.1.0"

__all__ = [
    "Averaging",
    "CaptureError",
    "Checkpoint",
    "DiskFullError",
    "GraphError",
    "Job",
    "JobError",
    "PeerError",
    "Pipeline",
    "PlanError",
    "RavnestError",
    "RefusedError",
    "RunError",
    "TrainResult",
    "TrainingError",
    "__version__",
]

_LAZY = {
    "Job": "ravnest.job",
    "Averaging": "ravnest.settings",
    "Checkpoint": "ravnest.settings",
    "Pipeline": "ravnest.settings",
    "TrainResult": "ravnest.coordinator.launch.session",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ravnest' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    # Cached: later accesses do not call this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

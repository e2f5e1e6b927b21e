"""Cache of a model's costs on this machine, in the run directory: a resumed run does not measure them again.

The measurement takes seconds, or a minute for a large model, and all stages would wait for it when a killed coordinator
starts again. The cache is valid for the same model, optimizer and batch on the same machine.
"""

import contextlib
import hashlib
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ravnest.errors import RunError
from ravnest.graph.capture.capture import Captured
from ravnest.graph.profile import CostProfile, NodeCost
from ravnest.graph.update_cost import UpdateCost
from ravnest.job import Job
from ravnest.monitor.files import write_atomic


def key_of(job: Job, captured: Captured, threads: int | None) -> str:
    """Hash of everything that the costs depend on."""
    shapes = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in sorted(captured.sample.items())}
    machine = [platform.node(), platform.machine(), os.cpu_count(), torch.__version__]
    pipeline = [job.pipeline.accumulate, job.pipeline.precision, job.pipeline.compiled, job.pipeline.moments]
    pipeline.append(job.pipeline.correction)
    told = [captured.graph.to_json(), job.optimizer_spec.to_json(), pipeline, shapes, machine, threads]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def kept_costs(path: Path, key: str) -> CostProfile | None:
    """The costs stored under this key; None if there are none, or they cannot be read."""
    try:
        told: dict[str, Any] = json.loads(path.read_text())
        if told.pop("key") != key:
            return None
        nodes = {name: NodeCost(**cost) for name, cost in told.pop("nodes").items()}
        return CostProfile(nodes, update=UpdateCost(**told.pop("update")), **told)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def keep_costs(path: Path, key: str, costs: CostProfile) -> None:
    """Stores the costs; a disk error is ignored, as the run can go on without the cache."""
    with contextlib.suppress(RunError):
        write_atomic(path, json.dumps({"key": key, **asdict(costs)}))

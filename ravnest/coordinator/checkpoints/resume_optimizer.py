"""Optimizer and schedule of a resumed run: the state comes from the checkpoint, the arguments from the job.

Torch's own `load_state_dict` would restore the old arguments too: a learning rate that the user lowered because the
loss was not finite would silently be the old one again.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch

from ravnest.errors import RunError
from ravnest.graph.state_size import MAX_STATE_VALUES
from ravnest.job import Job
from ravnest.safe_json import read_json
from ravnest.spec import OptimizerSpec, ScheduleSpec


def trained_with(job: Job) -> dict[str, str | None]:
    """The job's optimizer and schedule, as a checkpoint's manifest records them."""
    schedule = job.schedule_spec
    return {"optimizer": job.optimizer_spec.to_json(), "schedule": None if schedule is None else schedule.to_json()}


def resumed_metadata(parts: list[dict[str, str]], saved_with: Mapping[str, Any], job: Job) -> dict[str, str]:
    """The plain state of all stages in one, with the job's own arguments; a resumed run may be partitioned otherwise.

    A schedule of another kind than before starts again. RunError when the optimizer is another one, so that its state
    does not fit, or when the state cannot be read.
    """
    try:
        return _resumed_metadata(parts, saved_with, job)
    except (AttributeError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        raise RunError(f"the optimizer's state in the checkpoint is damaged ({said}); start afresh") from None


def _resumed_metadata(parts: list[dict[str, str]], saved_with: Mapping[str, Any], job: Job) -> dict[str, str]:
    values: dict[str, Any] = {}
    for part in parts:
        values.update(read_json(part["optimizer"], MAX_STATE_VALUES)["values"])
    groups = read_json(parts[0]["optimizer"], MAX_STATE_VALUES)["groups"]
    schedule = read_json(parts[0]["schedule"])
    if "optimizer" in saved_with:
        before, now = OptimizerSpec.from_json(saved_with["optimizer"]), job.optimizer_spec
        if before.name != now.name:
            raise RunError(
                f"the run was trained with {before.name} and its state does not fit {now.name}; "
                "resume with the same optimizer, or start afresh in another --run"
            )
        groups, schedule = _with_arguments(groups, schedule, _defaults(before), _defaults(now))
        groups, schedule = _with_schedule(groups, schedule, saved_with["schedule"], job.schedule_spec)
    # Sorted: the same state gives the same text and so the same artifact, however the model was partitioned.
    optimizer = json.dumps({"values": values, "groups": groups}, sort_keys=True)
    # The ring positions and the applied microbatches of a replica belong to the deployment that it was made in.
    rest = {name: value for name, value in parts[0].items() if name not in ("rings", "applied")}
    return {**rest, "optimizer": optimizer, "schedule": json.dumps(schedule, sort_keys=True)}


def _defaults(spec: OptimizerSpec) -> dict[str, Any]:
    """All arguments of the optimizer, including the defaults."""
    return dict(spec.build([torch.nn.Parameter(torch.zeros(1, 1))]).defaults)


def _with_arguments(
    groups: list[dict[str, Any]], schedule: dict[str, Any] | None, before: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    changed = {key: value for key, value in now.items() if before.get(key) != value and key != "lr"}
    groups = [{**group, **{k: v for k, v in changed.items() if k in group}} for group in groups]
    if before["lr"] != now["lr"]:
        # A schedule has scaled the old rate: it scales the new one by as much.
        factor = now["lr"] / before["lr"] if schedule is not None and before["lr"] else None
        for group in groups:
            group["lr"] = now["lr"] if factor is None else group["lr"] * factor
            if "initial_lr" in group:
                group["initial_lr"] = now["lr"]
        if schedule is not None:
            schedule = {**schedule, "base_lrs": [now["lr"] for _ in groups], "_last_lr": [g["lr"] for g in groups]}
    return groups, schedule


def _with_schedule(
    groups: list[dict[str, Any]], state: dict[str, Any] | None, saved: str | None, now: ScheduleSpec | None
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    before = None if saved is None else ScheduleSpec.from_json(saved)
    if before == now or (before is None and now is None):
        return groups, state
    if before is not None and now is not None and before.name == now.name and state is not None:
        # A schedule keeps its arguments under their own names, next to its position.
        return groups, {**state, **{key: value for key, value in now.arguments.items() if key in state}}
    # Without these, a stage keeps the rate that it was built with: the one at the start of its schedule, if any.
    return [{key: value for key, value in group.items() if key not in _MOVED} for group in groups], None


_MOVED = ("lr", "initial_lr", "max_lr", "min_lr")
"""Entries that a schedule writes into the optimizer."""

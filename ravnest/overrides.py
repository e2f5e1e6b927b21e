"""Overrides of job settings by `--set a.b=c`.

Only plain values can be set: the job's own numbers, the nested settings, and the arguments of the optimizer and the
schedule.
"""

import dataclasses
import difflib
from collections.abc import Iterable
from functools import partial
from typing import Any

from ravnest.errors import JobError
from ravnest.job import Job

Plain = bool | int | float | str | None

_OWN = ("epochs", "max_updates", "eval_every", "seed")
_NESTED = ("pipeline", "averaging", "checkpoint")
_BY_ARGUMENT = ("optimizer", "schedule")


def apply_overrides(job: Job, overrides: Iterable[str]) -> Job:
    """A new Job with each `key=value` applied; the given Job is unchanged. For a repeated key the last value counts.

    A value is a number (`3`, `1e-3`), `true`, `false` or `none`; anything else is a string. Raises JobError for a text
    without `=`, an unknown key (with the closest known one) and a value that the field does not accept.
    """
    nested: dict[str, dict[str, Plain]] = {}
    for override in overrides:
        key, equals, text = (part.strip() for part in override.partition("="))
        if not equals or not key:
            raise JobError(f"--set {override!r} has no value: write it as key=value, such as epochs=3")
        group, _, name = key.partition(".")
        if group in _NESTED and name in {field.name for field in dataclasses.fields(getattr(job, group))}:
            # All values of a group are applied together, because some are only valid in combination.
            nested.setdefault(group, {})[name] = _parsed(text)
        else:
            job = _replaced(job, key, _parsed(text))
    changes = {group: dataclasses.replace(getattr(job, group), **values) for group, values in nested.items()}
    return _rebuilt(job, **changes) if changes else job


def settable_keys(job: Job) -> list[str]:
    """All keys that can be set, except arguments that the optimizer or schedule does not have yet."""
    keys = list(_OWN)
    for name in _NESTED:
        keys += [f"{name}.{field.name}" for field in dataclasses.fields(getattr(job, name))]
    keys += [f"optimizer.{argument}" for argument in job.optimizer_spec.arguments]
    if job.schedule_spec is not None:
        keys += [f"schedule.{argument}" for argument in job.schedule_spec.arguments]
    return keys


def _replaced(job: Job, key: str, value: Plain) -> Job:
    group, dot, name = key.partition(".")
    if not dot and key in _OWN:
        return _rebuilt(job, **{key: value})
    if group in _BY_ARGUMENT and name.isidentifier():
        given = getattr(job, group)
        if given is None:
            raise JobError(f"--set {key}: the job has no {group}: give it one in the job file")
        cls, arguments = (given.func, given.keywords) if isinstance(given, partial) else (given, {})
        return _rebuilt(job, **{group: partial(cls, **{**arguments, name: value})})
    near = difflib.get_close_matches(key, settable_keys(job), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(settable_keys(job))}"
    raise JobError(f"--set {key}: there is no such setting; {hint}")


def _rebuilt(job: Job, **changes: Any) -> Job:
    return dataclasses.replace(job, **changes)


def _parsed(text: str) -> Plain:
    words: dict[str, Plain] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text

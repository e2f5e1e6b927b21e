"""One stage: forward, backward and update of its part of the model. No threads and no sockets here.

What a backward sees is up to the version policy (passes.py, versions.py). The update comes at once after each
backward, or after `accumulate` of them, with the mean of their gradients. Everything a stage knows can be taken out
(`state`) and put back (`restore`).
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ravnest.engine.corrections.correction import correction_named
from ravnest.engine.finite_checks.origin import Finding
from ravnest.engine.passes.passes import Passes
from ravnest.engine.settings import StageSettings
from ravnest.engine.weights.buckets import pieces
from ravnest.engine.weights.versions import WeightVersions
from ravnest.errors import GraphError
from ravnest.graph.portable import PortableGraph
from ravnest.safe_json import read_json

_MAX_STATE_VALUES = 4_000_000
_MAX_SCHEDULE_STEPS = 10_000
"""Of a schedule at one update. More clusters than that do not train one model."""

# What reading a state of the wrong form raises, here and in torch.
_RESTORE_ERRORS = (AttributeError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Update:
    """What one update did: `forward_version` is the version the forward used, `version` the one the update made."""

    microbatch: int
    forward_version: int
    version: int
    oldest_version: int | None = None
    """Which the forward of the first microbatch of the update used, where several make one; None: the same."""

    @property
    def staleness(self) -> int:
        """Updates applied between the forward and this one; of several microbatches, those of the stalest."""
        oldest = self.forward_version if self.oldest_version is None else self.oldest_version
        return self.version - 1 - oldest


class Stage:
    """Holds the weights of one stage on one device and trains them."""

    def __init__(
        self,
        graph: PortableGraph,
        weights: Mapping[str, torch.Tensor],
        settings: StageSettings,
        device: torch.device | str = "cpu",
        memory_bytes: int | None = None,
    ) -> None:
        """`weights` holds every weight of the graph by key; they are taken over, not copied. GraphError if they do not
        fit.

        `memory_bytes`: what the stage may use; a microbatch for which that does not do ends with a LentMemoryError.
        """
        self.graph = graph
        self.settings = settings
        self.device = torch.device(device)
        for spec in graph.weights:
            tensor = weights.get(spec.key)
            if tensor is None or tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                raise GraphError(f"the weights for {spec.key} are missing or do not have the shape the graph says")
        self._versions = WeightVersions({p.name: weights[p.key].to(self.device) for p in graph.parameters})
        self._fixed = {c.name: weights[c.key].to(self.device) for c in (*graph.constants, *graph.states)}
        self.optimizer = settings.optimizer_spec().build(list(self._versions.masters.values()))
        self.correction = correction_named(
            settings.correction, self.optimizer, self._versions.masters, settings.warm_up_updates
        )
        schedule = settings.schedule_spec()
        self._schedule = None if schedule is None else schedule.build(self.optimizer)
        left = None if memory_bytes is None else memory_bytes - sum(w.nbytes for w in weights.values())
        self._passes = Passes(graph, self.device, self._versions, self._fixed, settings, left)
        self._pieces = pieces(self._versions.masters)
        self._sent: list[torch.Tensor] | None = None
        """What the last backward found for the stage before, until its gradients of weights are added up."""
        self._sums: dict[str, torch.Tensor] = {}
        self._summed = 0
        self._forward_version = 0
        self._oldest_version = 0
        self._versions_sum = 0
        """Of the forwards whose gradients are summed."""

    @property
    def in_flight(self) -> int:
        """Microbatches between forward and backward here."""
        return self._passes.in_flight

    @property
    def version(self) -> int:
        return self._versions.current.number

    @property
    def is_between_updates(self) -> bool:
        """Whether no gradient waits to be applied."""
        return not self._summed

    @property
    def versions_alive(self) -> int:
        """Copies of the weights: those that microbatches in flight hold, and the newest."""
        return self._passes.versions_alive

    @property
    def splits_backward(self) -> bool:
        """Whether `finish_backward` has something left to compute after `backward`."""
        return self._passes.splits

    def recompute_from_now_on(self) -> bool:
        """Keeps no activations of microbatches that come; whether that changes anything. The gradients stay the same,
        bit for bit."""
        return self._passes.recompute_from_now_on()

    @property
    def keeps_activations(self) -> bool:
        """Whether activations of microbatches are kept that could be computed again."""
        return self._passes.keeps_activations

    def forward(self, microbatch: int, values: Mapping[str, Any], *, again: bool = False) -> dict[str, Any]:
        """Training forward: what to send on, by name (on a leaf: the loss). Its backward must follow.

        One that comes `again` has been applied before: nothing of it stays in the stage, and no `update` may follow for
        it.
        """
        given = {name: self._here(value) for name, value in values.items()}
        return self._passes.forward(microbatch, given, self.correction.forward_weights(), again)

    def evaluate(self, values: Mapping[str, Any], microbatch: int = 0) -> dict[str, Any]:
        """Evaluation forward: what to send on; on a leaf the loss and the metrics, by value name. Nothing is kept."""
        return self._passes.evaluate({name: self._here(value) for name, value in values.items()}, microbatch)

    def backward(self, microbatch: int, gradients: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """Gradients for what was received; those of the weights are kept for `update`, which must follow.

        `gradients` are those of what was sent (None on a leaf: the loss is its own). Where the backward is split, those
        of the weights are computed by `finish_backward`.
        """
        given = None if gradients is None else {name: self._here(value) for name, value in gradients.items()}
        back = self._passes.backward(microbatch, given)
        if not self._passes.is_unfinished:
            return back
        self._sent = list(back.values())
        if not self._passes.splits:
            self.finish_backward()
        return back

    def finish_backward(self) -> None:
        """Computes what is left of the last backward, if anything is; `update` does so too."""
        if self._sent is None:
            return
        sent, self._sent = self._sent, None
        self._forward_version, gradients = self._passes.weight_gradients()
        if not self._summed:
            self._oldest_version, self._versions_sum = self._forward_version, 0
        self._versions_sum += self._forward_version
        self._add(gradients, sent)

    def update(self, microbatch: int, *, flush: bool = False, updates: int = 0) -> Update | None:
        """Applies the gradients of the last backward, where they complete an update; `flush` applies what is summed so
        far.

        `updates` is how many the run has made by then, those of other clusters included: the schedule follows it.
        Without it the schedule goes one step on.
        """
        self.finish_backward()
        if self._summed < self.settings.accumulate and not flush:
            return None
        self._apply()
        self._step_schedule(updates)
        oldest = None if self._oldest_version == self._forward_version else self._oldest_version
        return Update(microbatch, self._forward_version, self.version, oldest)

    def find_not_finite(self, microbatch: int) -> Finding | None:
        """Where values of this microbatch that are not finite arose; None where that is not known any more."""
        return self._passes.find_not_finite(microbatch)

    def drop(self, microbatch: int) -> None:
        """Forgets a microbatch whose backward will never come."""
        self._passes.drop(microbatch)

    def forget(self) -> None:
        """Forgets all microbatches that have not been applied: those between forward and backward, and gradients that
        wait for others. The stage goes on as if it had never seen them."""
        self._passes.forget()
        self._sent = None
        self._sums.clear()
        self._summed = 0

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Parameters, states and optimizer state as named tensors, and the plain values as text. Shares the stage's
        memory. What microbatches that have not been applied did to states is not in it."""
        plain: dict[str, Any] = {}
        for spec in self.graph.parameters:
            for name, value in self.optimizer.state.get(self._versions.masters[spec.name], {}).items():
                if value is not None and not isinstance(value, torch.Tensor):
                    plain[f"{spec.key}:{name}"] = value
        groups = [{k: v for k, v in g.items() if k != "params" and _is_plain(v)} for g in self.optimizer.param_groups]
        schedule = {k: v for k, v in self._schedule.state_dict().items() if _is_plain(v)} if self._schedule else None
        settled = self._passes.states.settled
        states = {f"buffer:{spec.key}": settled[spec.name] for spec in self.graph.states if spec.name in settled}
        return self.state_tensors() | states, {
            "version": json.dumps(self.version),
            "optimizer": json.dumps({"values": plain, "groups": groups}),
            "schedule": json.dumps(schedule),
        }

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of `state` alone, states as they are now."""
        tensors: dict[str, torch.Tensor] = {}
        for spec in self.graph.parameters:
            master = self._versions.masters[spec.name]
            tensors[f"param:{spec.key}"] = master.detach()
            for name, value in self.optimizer.state.get(master, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optim:{spec.key}:{name}"] = value
        for spec in self.graph.states:
            tensors[f"buffer:{spec.key}"] = self._fixed[spec.name]
        return tensors

    def shift(
        self,
        adds: Mapping[str, torch.Tensor],
        becomes: Mapping[str, torch.Tensor] | None = None,
        not_negative: Collection[str] = (),
    ) -> None:
        """Adds to parameters, states and optimizer state, named as in `state`; with `becomes`, that is what they are
        from now on. No update: the version stays. What the optimizer does not keep yet is left out.

        Of `not_negative`, no value is below zero afterwards.
        """

        def write(name: str, tensor: torch.Tensor) -> None:
            # Past the counter by which autograd notices writes, as for versions: what is in flight has its own memory.
            tensor = tensor.data
            if becomes is not None and name in becomes:
                tensor.copy_(becomes[name])
            else:
                tensor.add_(adds[name].to(tensor.device, tensor.dtype))
            if name in not_negative:
                tensor.clamp_(min=0)

        self._versions.begin_update()
        names = {spec.name: f"buffer:{spec.key}" for spec in self.graph.states if f"buffer:{spec.key}" in adds}
        for name in names:
            # In memory of its own: what it was may be part of a microbatch in flight.
            self._fixed[name] = self._fixed[name].clone()
        own = self.state_tensors()
        for name in adds:
            if name in own:
                write(name, own[name])
        if names:
            self._passes.states.shift_settled(lambda state, copy: write(names[state], copy) if state in names else None)
        self._versions.finish_change()
        self.correction.moved()

    def restore(self, optimizer: Mapping[str, Mapping[str, torch.Tensor]], metadata: Mapping[str, str]) -> None:
        """Takes up optimizer state (by parameter key) and counters as `state` gave them; GraphError if they do not
        fit."""
        try:
            self._restore(optimizer, metadata)
        except _RESTORE_ERRORS as error:
            said = f"{type(error).__name__}: {error}"
            raise GraphError(f"the saved state of a stage cannot be read ({said}); the checkpoint is damaged") from None

    def _restore(self, optimizer: Mapping[str, Mapping[str, torch.Tensor]], metadata: Mapping[str, str]) -> None:
        plain = read_json(metadata["optimizer"], _MAX_STATE_VALUES)
        groups, values = plain["groups"], plain["values"]
        schedule = read_json(metadata["schedule"])
        version = read_json(metadata["version"])
        if type(version) is not int or not 0 <= version < 2**63:
            raise ValueError("the version is not a number of updates")
        saved: dict[int, dict[str, Any]] = {}
        for index, spec in enumerate(self.graph.parameters):
            entries: dict[str, Any] = dict(optimizer.get(spec.key, {}))
            prefix = f"{spec.key}:"
            entries.update({k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)})
            if entries:
                saved[index] = entries
        current = self.optimizer.state_dict()
        for group, stored in zip(current["param_groups"], groups, strict=True):
            # What this torch does not know is left out, and which parameters there are is the graph's to say.
            known = {k: v for k, v in stored.items() if k in group and k != "params"}
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in known.items()})
        self.optimizer.load_state_dict({"state": saved, "param_groups": current["param_groups"]})
        if self._schedule is not None and schedule is not None:
            # Torch makes each entry an attribute, whatever its name is: only those that a schedule saves are taken.
            own = self._schedule.state_dict()
            self._schedule.load_state_dict({k: v for k, v in schedule.items() if k in own})
        self._versions.current.number = version

    def _add(self, gradients: Mapping[str, torch.Tensor | None], sent: Iterable[torch.Tensor]) -> None:
        # autograd may hand out one tensor as the gradient of two values, or one that repeats a single number: what is
        # summed or clipped in place must be memory of its own, and not what is on its way to the stage before.
        taken = {g.untyped_storage().data_ptr() for g in sent}
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            if name in self._sums:
                self._sums[name].add_(gradient)
                continue
            memory = gradient.untyped_storage().data_ptr()
            own = self.settings.accumulate == 1 and memory not in taken and 0 not in gradient.stride()
            self._sums[name] = gradient if own else gradient.clone(memory_format=torch.contiguous_format)
            taken.add(memory)
        self._summed += 1

    def _apply(self) -> None:
        self._versions.begin_update()
        masters = self._versions.masters
        if self._summed > 1:
            for gradient in self._sums.values():
                gradient.div_(self._summed)
        if self.settings.clip_value is not None or self.settings.clip_norm is not None:
            self._clip(masters)
        # A mean of gradients is as stale as they are on average.
        self.correction.begin_update(self.version - self._versions_sum / self._summed, self.version)
        for piece in self._pieces:
            for name in piece:
                masters[name].grad = self._sums.pop(name, None)
            self.correction.step()
            for name in piece:
                masters[name].grad = None
        self._summed = 0
        self._passes.applied()
        self._versions.finish_update()

    def _step_schedule(self, updates: int) -> None:
        if self._schedule is None:
            return
        behind = updates - self._schedule.last_epoch
        for _ in range(min(max(1, behind), _MAX_SCHEDULE_STEPS)):
            self._schedule.step()

    def _clip(self, masters: Mapping[str, torch.nn.Parameter]) -> None:
        """Clips the summed gradients in place, all together: a norm is over all of them."""
        for name, master in masters.items():
            master.grad = self._sums.get(name)
        if self.settings.clip_value is not None:
            torch.nn.utils.clip_grad_value_(masters.values(), self.settings.clip_value)
        if self.settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(masters.values(), self.settings.clip_norm)
        self.optimizer.zero_grad(set_to_none=True)

    def _here(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device != self.device:
            return value.to(self.device, non_blocking=True)
        return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return value is None or isinstance(value, bool | int | float | str)

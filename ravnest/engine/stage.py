"""Stage: forward, backward and update of one part of the model, without threads or sockets.

The version policy decides which weights a backward uses (passes/, weights/versions.py). An update follows each backward
immediately, or every `accumulate` backwards with the mean of their gradients. `state` returns the whole state of a
stage, and `restore` sets it.

On failure: weights that do not fit the graph and a state that cannot be read raise GraphError; a pass that would take
more memory than allowed raises LentMemoryError and leaves the stage usable.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ravnest.engine.corrections.correction import correction_named
from ravnest.engine.finite_checks.origin import ForwardDiagnosis
from ravnest.engine.passes.passes import Passes
from ravnest.engine.passes.row_lookups import RowLookups
from ravnest.engine.settings import StageSettings
from ravnest.engine.update_pass import UpdatePass
from ravnest.engine.weights.frozen_state import FrozenStates, StateTensors
from ravnest.engine.weights.gradient_sum import GradientSum
from ravnest.engine.weights.packed_moments import PackedMoment, moments_in, unpacked_state
from ravnest.engine.weights.row_gradients import RowGradients
from ravnest.engine.weights.versions import WeightVersions
from ravnest.errors import GraphError
from ravnest.graph.portable import PortableGraph
from ravnest.graph.state_size import MAX_STATE_VALUES
from ravnest.safe_json import read_json

_MAX_SCHEDULE_STEPS = 10_000
"""Maximum number of schedule steps at one update; a run never has that many clusters."""

# Exceptions that a malformed state raises, here and in torch.
_RESTORE_ERRORS = (AttributeError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Update:
    """Record of one update."""

    microbatch: int
    """The last microbatch of the update."""
    forward_version: int
    """The version that its forward used."""
    version: int
    """The version that the update made."""
    oldest_version: int | None = None
    """The version that the forward of the update's first microbatch used; None: the same as `forward_version`."""

    lookup_version: int = 0
    """The version in which rows were looked up for the update's last microbatch, at a leaf that does so."""
    rows: tuple[int, ...] = ()
    """The microbatches whose gradients of rows the update includes."""

    @property
    def staleness(self) -> int:
        """Number of updates between the forward and this update; the maximum if the update has several microbatches."""
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
        """`weights` holds every weight of the graph by key. The stage uses them without a copy.

        `memory_bytes`: the memory that the stage may use.
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
        self._moments = moments_in(settings.moments, self.optimizer)
        self.correction = correction_named(
            settings.correction, self.optimizer, self._versions.masters, settings.warm_up_updates
        )
        schedule = settings.schedule_spec()
        self._schedule = None if schedule is None else schedule.build(self.optimizer)
        # Torch warns if the first step of a schedule comes before that of its optimizer, which `_apply` intends.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        left = None if memory_bytes is None else memory_bytes - sum(w.nbytes for w in weights.values())
        self._passes = Passes(graph, self.device, self._versions, self._fixed, settings, left)
        self._lookups = RowLookups(graph, self.device, left) if graph.lookups else None
        self._row_gradients = RowGradients()
        self._frozen = FrozenStates()
        self._update_pass = UpdatePass(
            self._versions,
            self.optimizer,
            settings.clip_norm,
            settings.clip_value,
            moments=self._moments,
            frozen=self._frozen,
        )
        self._exchanged: list[torch.Tensor] | None = None
        """Gradients that the last backward received and returned, until its weight gradients are summed."""
        self._gradients = GradientSum()
        """Weight gradients for the next update."""

    @property
    def in_flight(self) -> int:
        """Microbatches between forward and backward here; on a leaf that looks rows up, those whose gradients of rows
        have not come back."""
        return self._passes.in_flight if self._lookups is None else self._lookups.in_flight

    @property
    def version(self) -> int:
        return self._versions.current.number

    @property
    def is_between_updates(self) -> bool:
        """Whether no gradient waits to be applied."""
        return not self._gradients.versions and self._row_gradients.is_empty

    @property
    def versions_alive(self) -> int:
        """Number of copies of the weights: those held by microbatches in flight, and the latest."""
        return self._passes.versions_alive

    @property
    def splits_backward(self) -> bool:
        """Whether `backward` leaves the weight gradients to `finish_backward`."""
        return self._passes.splits

    def start_recomputing(self) -> bool:
        """Stops keeping activations of later microbatches; returns whether that changes anything. The gradients stay
        the same, bit for bit."""
        return self._passes.start_recomputing()

    @property
    def keeps_activations(self) -> bool:
        """Whether the stage keeps activations that it could recompute."""
        return self._passes.keeps_activations

    def look_up(self, microbatch: int, values: Mapping[str, Any], *, train: bool = True) -> dict[str, torch.Tensor]:
        """The rows of the stage's weights that the root needs for this microbatch, by the name of their value. In
        training, `add_row_gradients` must follow."""
        assert self._lookups is not None, "this stage looks nothing up"
        given = {name: self._to_device(value) for name, value in values.items()}
        weights, version = self._versions.current.leaves | self._fixed, self.version
        return self._lookups.look_up(microbatch, given, weights, version=version, train=train)

    def add_row_gradients(self, microbatch: int, gradients: Mapping[str, torch.Tensor], *, again: bool = False) -> None:
        """Takes the gradients of the rows of this microbatch; they are summed with those of the last backward. `again`:
        an update had them."""
        assert self._lookups is not None, "this stage looks nothing up"
        given = {name: self._to_device(value) for name, value in gradients.items()}
        found = self._lookups.gradients(microbatch, given)
        if not again:
            self._row_gradients.add(microbatch, found)

    def forward(self, microbatch: int, values: Mapping[str, Any], *, again: bool = False) -> dict[str, Any]:
        """Training forward: returns the values to send on by name, on a leaf the loss. Its backward must follow.

        `again`: the microbatch was applied before. It changes nothing in the stage, and no `update` may follow for it.
        """
        given = {name: self._to_device(value) for name, value in values.items()}
        sent = self._passes.forward(microbatch, given, self.correction.forward_weights(), again)
        if self._passes.writes_in_place:
            # No microbatch holds the predicted weights: drop them, so that they are not in memory with the gradients.
            self.correction.moved()
        return sent

    def evaluate(self, values: Mapping[str, Any], microbatch: int = 0) -> dict[str, Any]:
        """Evaluation forward: returns the values to send on by name, on a leaf the loss and the metrics. The stage does
        not change."""
        return self._passes.evaluate({name: self._to_device(value) for name, value in values.items()}, microbatch)

    def backward(self, microbatch: int, gradients: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """Returns the gradients of the received values; the weight gradients are kept for `update`, which must follow.

        `gradients` are those of the sent values; None on a leaf, which has the loss. With a split backward, the weight
        gradients are computed by `finish_backward`.
        """
        given = None if gradients is None else {name: self._to_device(value) for name, value in gradients.items()}
        back = self._passes.backward(microbatch, given)
        if not self._passes.is_unfinished:
            return back
        self._exchanged = [*back.values(), *(given or {}).values()]
        if not self._passes.splits:
            self.finish_backward()
        return back

    def finish_backward(self) -> None:
        """Computes and sums the weight gradients that the last backward left, if any; `update` calls it too."""
        if self._exchanged is None:
            return
        exchanged, self._exchanged = self._exchanged, None
        version, gradients = self._passes.weight_gradients()
        if self._lookups is None:
            self._gradients.add(gradients, version, exchanged)
        else:
            self._row_gradients.hold(gradients, version, exchanged)

    def update(self, microbatch: int, *, flush: bool = False, updates: int = 0) -> Update | None:
        """Applies the summed gradients if `accumulate` of them are summed or `flush` is set; None if they are not.

        `updates`: the number of updates that the run has made by then, over all clusters. The schedule follows it;
        without it, the schedule advances by one step.
        """
        self.finish_backward()
        gradients = self._gradients
        self._row_gradients.sum_into(gradients, self._versions.masters, self.version, self.settings.accumulate)
        if not gradients.versions or (len(gradients.versions) < self.settings.accumulate and not flush):
            return None
        self._apply(gradients, updates)
        self._gradients = GradientSum()
        oldest, newest = gradients.versions[0], gradients.versions[-1]
        update = Update(microbatch, newest, self.version, None if oldest == newest else oldest)
        if self._lookups is None:
            return update
        rows = self._row_gradients.pop_microbatches()
        return replace(update, lookup_version=self._lookups.version_of(microbatch), rows=rows)

    def diagnose_forward(self, microbatch: int) -> ForwardDiagnosis | None:
        """The origin of values of this microbatch that are not finite; None if its inputs are no longer here."""
        return self._passes.diagnose_forward(microbatch)

    def forget(self) -> None:
        """Discards all microbatches that have not been applied: those between forward and backward, and summed
        gradients. The stage continues as if it had never seen them."""
        self._passes.forget()
        if self._lookups is not None:
            self._lookups.forget()
        self._row_gradients.forget()
        self._exchanged = None
        self._gradients = GradientSum()

    def state(self) -> tuple[StateTensors, dict[str, str]]:
        """The parameters, model states and optimizer state as named tensors, and the other values as JSON text.

        The tensors share the stage's memory, except moments that it holds in 8 bits: these are float32 copies. A caller
        that needs them for longer freezes them. The model states exclude the effect of microbatches not yet applied.
        """
        plain: dict[str, Any] = {}
        for spec in self.graph.parameters:
            for name, value in self.optimizer.state.get(self._versions.masters[spec.name], {}).items():
                if value is not None and not isinstance(value, torch.Tensor | PackedMoment):
                    plain[f"{spec.key}:{name}"] = value
        groups = [{k: v for k, v in g.items() if k != "params" and _is_plain(v)} for g in self.optimizer.param_groups]
        schedule = {k: v for k, v in self._schedule.state_dict().items() if _is_plain(v)} if self._schedule else None
        settled = self._passes.states.settled
        states = {f"buffer:{spec.key}": settled[spec.name] for spec in self.graph.states if spec.name in settled}
        return StateTensors(self.state_tensors() | states, self._frozen), {
            "version": json.dumps(self.version),
            "optimizer": json.dumps({"values": plain, "groups": groups}),
            "schedule": json.dumps(schedule),
        }

    def state_tensors(self, *, with_packed: bool = True) -> dict[str, torch.Tensor]:
        """The tensors of `state`, with the current model states; optionally without moments that are in 8 bits."""
        tensors: dict[str, torch.Tensor] = {}
        for spec in self.graph.parameters:
            master = self._versions.masters[spec.name]
            tensors[f"param:{spec.key}"] = master.detach()
            state = self.optimizer.state.get(master, {})
            for name, value in (unpacked_state(state) if with_packed else state).items():
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
        """Adds `adds` to parameters, model states and optimizer state, named as in `state`; the version stays.

        Tensors named in `becomes` are set to that value instead. Optimizer state that does not exist yet is skipped.
        Tensors named in `not_negative` are clamped to at least zero.
        """

        def write(name: str, tensor: torch.Tensor) -> None:
            # `.data` bypasses autograd's check for in-place writes: the version policy allows them.
            tensor = tensor.data
            self._frozen.protect(tensor)
            if becomes is not None and name in becomes:
                tensor.copy_(becomes[name])
            else:
                tensor.add_(adds[name].to(tensor.device, tensor.dtype))
            if name in not_negative:
                tensor.clamp_(min=0)

        self._versions.begin_update()
        names = {spec.name: f"buffer:{spec.key}" for spec in self.graph.states if f"buffer:{spec.key}" in adds}
        for name in names:
            # In new memory: a microbatch in flight may use the old tensor.
            self._fixed[name] = self._fixed[name].clone()
        keys = {name.removeprefix("optim:").rpartition(":")[0] for name in adds if name.startswith("optim:")}
        moved = [self._versions.masters[spec.name] for spec in self.graph.parameters if spec.key in keys]
        with self._moments.unpacked(moved, self.version):
            own = self.state_tensors(with_packed=False)
            for name in adds:
                if name in own:
                    write(name, own[name])
        if names:
            self._passes.states.shift_settled(lambda state, copy: write(names[state], copy) if state in names else None)
        self._versions.finish_change()
        self.correction.moved()

    def restore(self, optimizer: Mapping[str, Mapping[str, torch.Tensor]], metadata: Mapping[str, str]) -> None:
        """Sets the optimizer state (by parameter key) and the metadata that `state` returned; GraphError if they do not
        fit."""
        try:
            self._restore(optimizer, metadata)
        except _RESTORE_ERRORS as error:
            said = f"{type(error).__name__}: {error}"
            raise GraphError(f"the saved state of a stage cannot be read ({said}); the checkpoint is damaged") from None

    def _restore(self, optimizer: Mapping[str, Mapping[str, torch.Tensor]], metadata: Mapping[str, str]) -> None:
        plain = read_json(metadata["optimizer"], MAX_STATE_VALUES)
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
            # Options that this version of torch lacks are skipped; the parameters are those of the graph.
            known = {k: v for k, v in stored.items() if k in group and k != "params"}
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in known.items()})
        self.optimizer.load_state_dict({"state": saved, "param_groups": current["param_groups"]})
        self._moments.pack(list(self._versions.masters.values()), version)
        if self._schedule is not None and schedule is not None:
            # Torch sets an attribute for each entry, whatever its name: accept only the names that a schedule saves.
            own = self._schedule.state_dict()
            self._schedule.load_state_dict({k: v for k, v in schedule.items() if k in own})
        self._versions.current.number = version

    def _apply(self, gradients: GradientSum, updates: int) -> None:
        # The schedule goes first, because weights are predicted for the options that follow this update.
        options = self._options()
        self._step_schedule(updates)
        ahead = self._options()
        [group] = self.optimizer.param_groups
        group.update(options)
        self._update_pass.run(gradients, self.correction, ahead)
        group.update(ahead)
        self._passes.applied()

    def _options(self) -> dict[str, Any]:
        """A copy of the optimizer's options, such as its learning rate."""
        [group] = self.optimizer.param_groups
        return {name: value for name, value in group.items() if name != "params"}

    def _step_schedule(self, updates: int) -> None:
        if self._schedule is None:
            return
        behind = updates - self._schedule.last_epoch
        for _ in range(min(max(1, behind), _MAX_SCHEDULE_STEPS)):
            self._schedule.step()

    def _to_device(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device != self.device:
            return value.to(self.device, non_blocking=True)
        return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    return value is None or isinstance(value, bool | int | float | str)

"""Forward and backward of a stage's microbatches, and what is kept of each in between: that is its version policy.

A policy that keeps no activations keeps what came in, and computes the forward a second time for the backward. The
second time is the first over again: random operators are seeded by the microbatch, and what the model changes as it
runs (batch-norm statistics, counters) is a copy from before the first time, which is thrown away afterwards.

The first time is run with gradients as well, and what autograd saved is let go at once: without, torch picks other
kernels for some operators, and then the two would differ in the last digit, or in what dropout drops. A backward takes
as much memory, so the peak of a stage is none the higher.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ravnest.engine.not_finite import Finding, find
from ravnest.engine.precision import Precision
from ravnest.engine.settings import StageSettings
from ravnest.engine.split_backward import Gradients, SplitBackward
from ravnest.engine.versions import Version, WeightVersions
from ravnest.errors import TrainingError
from ravnest.graph.aliasing import Aliases, written_names
from ravnest.graph.portable import PortableGraph
from ravnest.graph.program import Program, WeightUse
from ravnest.version_policy import POLICIES


@dataclass(slots=True)
class _Computed:
    """A forward whose backward can be run."""

    received: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    apart: list[WeightUse]


@dataclass(slots=True)
class _Pending:
    """A microbatch between forward and backward."""

    number: int
    """Of the version its forward used."""
    version: Version | None
    """Held until the backward; None where the weights of now will do."""
    computed: _Computed | None
    """None where the forward is to be computed again, from these."""
    given: dict[str, Any]
    states: dict[str, torch.Tensor]
    again: bool
    """It has been applied before: its weights need no gradients."""


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """A backward whose gradients of weights have not been taken yet. It holds no more of the graph than these need."""

    microbatch: int
    number: int
    version: Version | None
    weights: dict[str, torch.Tensor]
    found: Gradients
    split: SplitBackward | None


class Passes:
    """Runs the program of one stage under its version policy."""

    def __init__(
        self,
        graph: PortableGraph,
        device: torch.device,
        versions: WeightVersions,
        fixed: dict[str, torch.Tensor],
        settings: StageSettings,
        memory_bytes: int | None = None,
    ) -> None:
        """`fixed` are the constants and states, by name in the graph; each training forward puts new states there. With
        `memory_bytes`, a microbatch that would take more ends with a LentMemoryError before it does."""
        self._program = Program(graph, device, compiled=settings.compiled, memory_bytes=memory_bytes)
        self._precision = Precision(settings.precision, device)
        self._sent_types = {v.name: v.dtype for v in graph.sends}
        self._versions = versions
        self._fixed = fixed
        self._seed = settings.seed
        policy = POLICIES[settings.versions]
        self._is_leaf = graph.loss is not None
        self._keeps_weights = policy.keeps_weights or self._is_leaf
        self._keeps_activations = policy.keeps_activations or self._is_leaf
        self._max_pending = settings.accumulate if policy.within_accumulate else None
        self._receives = [v.name for v in graph.receives if v.needs_grad]
        self._given = [v.name for v in (*graph.inputs, *graph.receives)]
        self._led_back = {*(v.name for v in graph.sends if v.needs_grad), *([graph.loss] if graph.loss else ())}
        """What gradients may come for."""
        self._states = [s.name for s in graph.states]
        aliases = Aliases(graph)
        written = {aliases.group(name) for node in graph.nodes for name in written_names(node)}
        self._written = [v.name for v in (*graph.inputs, *graph.receives) if aliases.group(v.name) in written]
        divisible = self._program.can_split and not self._precision.scales
        self.splits = settings.split_backward and bool(self._receives) and divisible
        """Whether the gradients of weights are found after those of what was received."""
        self._pending: dict[int, _Pending] = {}
        self._unfinished: _Unfinished | None = None
        self._before: dict[int, dict[str, torch.Tensor]] = {}
        """States before the forward of each microbatch that has not been applied, in the order of the forwards."""
        self._last: tuple[int, _Pending] | None = None
        """On a leaf, the one whose backward came last, until its gradients are applied."""
        self._summed: list[int] = []
        """Microbatches whose gradients were taken and wait to be applied."""

    @property
    def is_unfinished(self) -> bool:
        """Whether the last backward has gradients of weights to give."""
        return self._unfinished is not None

    @property
    def settled_states(self) -> dict[str, torch.Tensor]:
        """The states without what microbatches did to them that have not been applied; empty where there are none of
        these. By name, to be read."""
        return next(iter(self._before.values()), {})

    @property
    def in_flight(self) -> int:
        """Microbatches between forward and backward here."""
        return len(self._pending)

    @property
    def versions_alive(self) -> int:
        """Of the weights: those that microbatches in flight hold, and the newest."""
        held = [pending.version for pending in self._pending.values() if pending.version]
        # By their weights: predicted ones are shared too.
        return len({id(version.leaves) for version in (*held, self._versions.current)})

    @property
    def keeps_activations(self) -> bool:
        """Whether activations of microbatches are kept that could be computed again."""
        return self._keeps_activations and not self._is_leaf

    def recompute_from_now_on(self) -> bool:
        """Keeps no activations of microbatches that come, whatever the policy says; whether that changes anything.

        Those in flight have theirs. A leaf has its backward at once, and nothing to compute again.
        """
        changes = self.keeps_activations
        if changes:
            self._keeps_activations = False
        return changes

    def forward(
        self,
        microbatch: int,
        given: dict[str, Any],
        instead: dict[str, torch.Tensor] | None = None,
        again: bool = False,
    ) -> dict[str, Any]:
        """What to send on, by name. Its backward must follow. `instead` are the weights to use in place of the current
        ones, as a correction of staleness says. One that comes `again` leaves the states as they are."""
        if self._max_pending is not None and len(self._pending) >= self._max_pending:
            raise TrainingError(
                f"microbatch {microbatch} came while {len(self._pending)} are in flight at this stage: with two "
                "versions of the weights no more may be than make an update; set pipeline.in_flight to "
                "pipeline.accumulate or less"
            )
        number = self._versions.current.number
        leaves = self._versions.current.leaves if instead is None else instead
        # Each forward writes states of its own: autograd may have saved those of a microbatch still in flight.
        before = {name: self._fixed[name] for name in self._states}
        states = self._copied_states()
        fixed = {**self._fixed, **states}
        if self._keeps_activations:
            computed, results = self._compute(microbatch, given, leaves, fixed)
            pending = _Pending(number, None, computed, given, {}, again)
        else:
            pending = _Pending(number, None, None, given, before, again)
            first = {**given, **{name: given[name].clone() for name in self._written}}
            _, results = self._compute(microbatch, first, leaves, fixed)
        if states and not again:
            self._fixed.update(states)
            self._before[microbatch] = before
        if self._keeps_weights:
            pending.version = self._versions.acquire(instead)
        self._pending[microbatch] = pending
        sent = {n: r.detach() if isinstance(r, torch.Tensor) else r for n, r in results.items()}
        return sent if self._keeps_weights else self._of_its_own(sent)

    def backward(self, microbatch: int, gradients: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """The gradients for what was received; `weight_gradients` must follow, unless it came again.

        `gradients` are those of what was sent (None on a leaf: the loss is its own).
        """
        pending = self._pending.pop(microbatch, None)
        if pending is None:
            raise TrainingError(f"a gradient for microbatch {microbatch} came, which has no forward here")
        if self._is_leaf:
            # Its loss is looked at after its backward.
            self._last = microbatch, replace(pending, version=None, computed=None)
        computed = pending.computed
        if computed is None:
            version = pending.version or self._versions.current
            fixed = {**self._fixed, **{name: state.clone() for name, state in pending.states.items()}}
            computed, _ = self._compute(microbatch, pending.given, version.leaves, fixed)
        if gradients is None:
            outputs = list(computed.outputs.values())
            given = [torch.ones_like(tensor) for tensor in outputs]
        else:
            outputs = [tensor for name, tensor in computed.outputs.items() if name in gradients]
            given = [gradients[name] for name in computed.outputs if name in gradients]
        if pending.again:
            self._release(pending.version)
            if not computed.received:
                return {}
            received = self._precision.gradients(outputs, list(computed.received.values()), given)
            return {n: g for n, g in zip(computed.received, received, strict=True) if g is not None}
        wanted = [*computed.received.values(), *computed.weights.values()]
        split = SplitBackward(computed.apart) if computed.apart else None
        found: list[torch.Tensor | None]
        if split is None:
            found = list(self._precision.gradients(outputs, wanted, given, all_leaves=True))
        else:
            found = split.first(outputs, given, wanted)
        count = len(computed.received)
        weights = dict(zip(computed.weights, found[count:], strict=True))
        self._unfinished = _Unfinished(microbatch, pending.number, pending.version, computed.weights, weights, split)
        return {n: g for n, g in zip(computed.received, found[:count], strict=True) if g is not None}

    def weight_gradients(self) -> tuple[int, Gradients]:
        """The gradients of the weights of the last backward, by name, and the version that its forward used."""
        assert self._unfinished is not None, "a backward comes first"
        left, self._unfinished = self._unfinished, None
        found = left.found if left.split is None else left.split.rest(left.weights, left.found)
        self._release(left.version)
        self._summed.append(left.microbatch)
        return left.number, found

    def applied(self) -> None:
        """All gradients that were taken so far are in the weights."""
        for microbatch in self._summed:
            self._before.pop(microbatch, None)
        self._summed.clear()
        self._last = None

    def forget(self) -> None:
        """Forgets every microbatch that has not been applied, and what it did to the states."""
        for pending in self._pending.values():
            self._release(pending.version)
        if self._unfinished is not None:
            self._release(self._unfinished.version)
        self._pending.clear()
        self._unfinished = self._last = None
        self._fixed.update(self.settled_states)
        self._before.clear()
        self._summed.clear()

    def shift_settled(self, shift: Callable[[str, torch.Tensor], None]) -> None:
        """Does the same to every copy of a state as was done to the state itself: `shift` gets a name and a tensor to
        write."""
        for before in self._before.values():
            for name, state in before.items():
                # In memory of its own: autograd may have saved the other.
                before[name] = state.clone()
                shift(name, before[name])

    def drop(self, microbatch: int) -> None:
        """Forgets a microbatch whose backward will never come."""
        pending = self._pending.pop(microbatch, None)
        self._before.pop(microbatch, None)
        if pending is not None:
            self._release(pending.version)

    def evaluate(self, given: Mapping[str, Any], microbatch: int = 0) -> dict[str, Any]:
        """Evaluation forward with the newest weights: what to send on, the loss and the metrics, by value name.

        What a model draws even in evaluation is seeded by the microbatch, as in training."""
        weights = {**self._versions.current.leaves, **self._fixed}
        with torch.no_grad():
            results = self._program.run(given, weights, train=False, seed=self._seed, microbatch=microbatch)
        return self._of_its_own(results)

    def find_not_finite(self, microbatch: int) -> Finding | None:
        """Where values of this microbatch that are not finite arose, found by running its forward once more; None where
        it is not known any more what it was given."""
        pending = self._pending.get(microbatch)
        if pending is None and self._last is not None and self._last[0] == microbatch:
            pending = self._last[1]
        if pending is None or any(name not in pending.given for name in self._given):
            return None
        version = pending.version or self._versions.current
        # Copies: the forward writes to them.
        states = {name: pending.states.get(name, self._fixed[name]).clone() for name in self._states}
        weights = {**version.leaves, **self._fixed, **states}
        with self._precision.computing():
            return find(self._program.graph, self._program, pending.given, weights, self._seed, microbatch)

    def _compute(
        self, microbatch: int, given: dict[str, Any], leaves: dict[str, torch.Tensor], fixed: Mapping[str, torch.Tensor]
    ) -> tuple[_Computed, dict[str, Any]]:
        received = {name: given[name].requires_grad_() for name in self._receives}
        apart: list[WeightUse] = []
        with torch.enable_grad(), self._precision.computing():
            results = self._program.run(
                given,
                {**leaves, **fixed},
                train=True,
                seed=self._seed,
                microbatch=microbatch,
                apart=apart if self.splits else None,
            )
            results = self._precision.as_told(results, self._sent_types)
        ends = {id(tensor) for tensor in (*received.values(), *leaves.values())}
        outputs = {n: r for n, r in results.items() if n in self._led_back and _leads_back(r, ends)}
        return _Computed(received, leaves, outputs, apart), results

    def _copied_states(self) -> dict[str, torch.Tensor]:
        return {name: self._fixed[name].clone() for name in self._states}

    def _release(self, version: Version | None) -> None:
        if version is not None:
            self._versions.release(version)

    def _of_its_own(self, results: dict[str, Any]) -> dict[str, Any]:
        """What lies in the memory of weights or states, copied: it must not change under the sender's hands when
        training goes on (a tied parameter that is sent on, for one)."""
        own = {t.untyped_storage().data_ptr() for t in (*self._versions.masters.values(), *self._fixed.values())}
        return {
            n: r.clone() if isinstance(r, torch.Tensor) and r.untyped_storage().data_ptr() in own else r
            for n, r in results.items()
        }


def _leads_back(tensor: torch.Tensor, ends: Container[int]) -> bool:
    """Whether a gradient can go back from this value to what was received or to a weight, or the value is itself one of
    these, by identity. A view that was taken under no_grad says that it requires a gradient, and leads nowhere."""
    return tensor.requires_grad and (tensor.grad_fn is not None or id(tensor) in ends)

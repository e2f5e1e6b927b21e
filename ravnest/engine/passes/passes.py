"""Forward and backward passes of a stage, and what it keeps of each microbatch in between: its version policy.

While a microbatch is on its way to the leaf and back, earlier ones update the stage's weights. If its backward used the
new weights with the activations of the old ones, the gradient would be that of no model. So the policy
(version_policy.py, `pipeline.versions`) decides what is kept for the backward:

    stash       the weights that the forward used, and its activations (PipeDream's weight stashing)
    double      the same; no more microbatches are in flight than make an update, so there are two versions at most
    recompute   the weights and what came in; the forward is computed a second time for the backward
    latest      only what came in; the forward is computed again with the newest weights, which needs no copy of weights

With each of them the gradient is exact for the weights that the backward uses. On a leaf the backward follows its
forward at once, so a leaf keeps everything, whatever the policy.

A second forward repeats the first one bit for bit: random operators are seeded by the microbatch, and the states that
the model changes as it runs are copies from before the first forward. The first forward runs with gradients enabled
too, and its saved tensors are released at once: without gradients torch picks other kernels for some operators, and
dropout or the last digit could differ. A backward takes as much memory, so the peak is not higher.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ravnest.engine.finite_checks.origin import Finding, find
from ravnest.engine.passes.precision import Precision
from ravnest.engine.passes.split_backward import Gradients, SplitBackward
from ravnest.engine.settings import StageSettings
from ravnest.engine.weights.model_states import ModelStates
from ravnest.engine.weights.versions import Version, WeightVersions
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
    """Number of the version that its forward used."""
    version: Version | None
    """Held until the backward; None: the backward uses the newest weights."""
    computed: _Computed | None
    """None: the forward is computed again, from `given` and `states`."""
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


@dataclass(frozen=True, slots=True)
class _Signature:
    """Names of the values that go into and out of a stage's graph."""

    given: tuple[str, ...]
    """Inputs and activations."""
    received: tuple[str, ...]
    """Activations that the stage before wants gradients for."""
    outputs: frozenset[str]
    """Values that gradients may come for: the loss, or what the stage after sends gradients of."""
    written: tuple[str, ...]
    """Inputs and activations that the graph writes to in place."""
    sent_types: Mapping[str, torch.dtype | None]

    @classmethod
    def of(cls, graph: PortableGraph) -> "_Signature":
        aliases = Aliases(graph)
        groups = {aliases.group(name) for node in graph.nodes for name in written_names(node)}
        given = tuple(v.name for v in (*graph.inputs, *graph.receives))
        outputs = {v.name for v in graph.sends if v.needs_grad} | ({graph.loss} if graph.loss else set())
        return cls(
            given=given,
            received=tuple(v.name for v in graph.receives if v.needs_grad),
            outputs=frozenset(outputs),
            written=tuple(name for name in given if aliases.group(name) in groups),
            sent_types={v.name: v.dtype for v in graph.sends},
        )


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
        policy = POLICIES[settings.versions]
        self.states = ModelStates([s.name for s in graph.states], fixed)
        self._signature = _Signature.of(graph)
        self._program = Program(graph, device, compiled=settings.compiled, memory_bytes=memory_bytes)
        self._precision = Precision(settings.precision, device)
        self._versions = versions
        self._seed = settings.seed
        self._is_leaf = graph.loss is not None
        self._keeps_weights = policy.keeps_weights or self._is_leaf
        self._keeps_activations = policy.keeps_activations or self._is_leaf
        self._max_pending = settings.accumulate if policy.within_accumulate else None
        can_split = self._program.can_split and not self._precision.scales
        self.splits = settings.split_backward and bool(self._signature.received) and can_split
        """Whether the gradients of weights are computed after those of the activations."""
        self._pending: dict[int, _Pending] = {}
        self._unfinished: _Unfinished | None = None
        self._last: tuple[int, _Pending] | None = None
        """On a leaf, the microbatch whose backward came last, until its gradients are applied."""
        self._summed: list[int] = []
        """Microbatches whose gradients were taken and wait to be applied."""

    @property
    def is_unfinished(self) -> bool:
        """Whether the last backward has gradients of weights to give."""
        return self._unfinished is not None

    @property
    def in_flight(self) -> int:
        """Microbatches between forward and backward here."""
        return len(self._pending)

    @property
    def versions_alive(self) -> int:
        """Copies of the weights: those that microbatches in flight hold, and the newest."""
        held = [pending.version for pending in self._pending.values() if pending.version]
        # Counted by their tensors: versions with predicted weights share them too.
        return len({id(version.leaves) for version in (*held, self._versions.current)})

    @property
    def keeps_activations(self) -> bool:
        """Whether the stage keeps activations that it could compute again."""
        return self._keeps_activations and not self._is_leaf

    def recompute_from_now_on(self) -> bool:
        """Keeps no activations of later microbatches, whatever the policy says; returns whether that changes anything.

        Microbatches in flight keep theirs. A leaf has its backward at once, and nothing to compute again.
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
        """Training forward: returns the values to send on, by name. The microbatch's backward must follow.

        `instead` are the weights to use in place of the current ones, as a correction of staleness says. A microbatch
        that comes `again` leaves the states as they are.
        """
        if self._max_pending is not None and len(self._pending) >= self._max_pending:
            raise TrainingError(
                f"microbatch {microbatch} came while {len(self._pending)} are in flight at this stage: with two "
                "versions of the weights no more may be than make an update; set pipeline.in_flight to "
                "pipeline.accumulate or less"
            )
        number = self._versions.current.number
        leaves = self._versions.current.leaves if instead is None else instead
        before, states = self.states.current(), self.states.copies()
        fixed = {**self.states.fixed, **states}
        if self._keeps_activations:
            computed, results = self._compute(microbatch, given, leaves, fixed)
            pending = _Pending(number, None, computed, given, {}, again)
        else:
            pending = _Pending(number, None, None, given, before, again)
            first = {**given, **{name: given[name].clone() for name in self._signature.written}}
            _, results = self._compute(microbatch, first, leaves, fixed)
        if not again:
            self.states.advance(microbatch, states)
        if self._keeps_weights:
            pending.version = self._versions.acquire(instead)
        self._pending[microbatch] = pending
        sent = {n: r.detach() if isinstance(r, torch.Tensor) else r for n, r in results.items()}
        return sent if self._keeps_weights else self._copied_if_shared(sent)

    def backward(self, microbatch: int, gradients: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """Returns the gradients for the stage before; `weight_gradients` must follow, unless the microbatch came again.

        `gradients` come from the stage after (None on a leaf, which has the loss).
        """
        pending = self._pending.pop(microbatch, None)
        if pending is None:
            raise TrainingError(f"a gradient for microbatch {microbatch} came, which has no forward here")
        if self._is_leaf:
            # The loss is checked only after the backward.
            self._last = microbatch, replace(pending, version=None, computed=None)
        computed = pending.computed
        if computed is None:
            version = pending.version or self._versions.current
            fixed = {**self.states.fixed, **{name: state.clone() for name, state in pending.states.items()}}
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
        self.states.settle(self._summed)
        self._summed.clear()
        self._last = None

    def forget(self) -> None:
        """Forgets every microbatch that is not applied yet, and its effect on the states."""
        for pending in self._pending.values():
            self._release(pending.version)
        if self._unfinished is not None:
            self._release(self._unfinished.version)
        self._pending.clear()
        self._unfinished = self._last = None
        self.states.forget()
        self._summed.clear()

    def drop(self, microbatch: int) -> None:
        """Forgets a microbatch whose backward will never come."""
        pending = self._pending.pop(microbatch, None)
        self.states.settle([microbatch])
        if pending is not None:
            self._release(pending.version)

    def evaluate(self, given: Mapping[str, Any], microbatch: int = 0) -> dict[str, Any]:
        """Evaluation forward with the newest weights: returns the values to send on, the loss and the metrics, by name.

        Random numbers that a model draws even in evaluation are seeded by the microbatch, as in training.
        """
        weights = {**self._versions.current.leaves, **self.states.fixed}
        with torch.no_grad():
            results = self._program.run(given, weights, train=False, seed=self._seed, microbatch=microbatch)
        return self._copied_if_shared(results)

    def find_not_finite(self, microbatch: int) -> Finding | None:
        """Finds where values of this microbatch that are not finite arose, by running its forward once more. None if
        its inputs are no longer here."""
        pending = self._pending.get(microbatch)
        if pending is None and self._last is not None and self._last[0] == microbatch:
            pending = self._last[1]
        if pending is None or any(name not in pending.given for name in self._signature.given):
            return None
        version = pending.version or self._versions.current
        weights = {**version.leaves, **self.states.fixed, **self.states.copies(instead=pending.states)}
        with self._precision.computing():
            return find(self._program.graph, self._program, pending.given, weights, self._seed, microbatch)

    def _compute(
        self, microbatch: int, given: dict[str, Any], leaves: dict[str, torch.Tensor], fixed: Mapping[str, torch.Tensor]
    ) -> tuple[_Computed, dict[str, Any]]:
        received = {name: given[name].requires_grad_() for name in self._signature.received}
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
            results = self._precision.as_told(results, self._signature.sent_types)
        ends = {id(tensor) for tensor in (*received.values(), *leaves.values())}
        outputs = {n: r for n, r in results.items() if n in self._signature.outputs and _leads_back(r, ends)}
        return _Computed(received, leaves, outputs, apart), results

    def _release(self, version: Version | None) -> None:
        if version is not None:
            self._versions.release(version)

    def _copied_if_shared(self, results: dict[str, Any]) -> dict[str, Any]:
        """Copies results that share memory with weights or states, such as a tied parameter that is sent on: training
        goes on, and must not change them before they are sent."""
        masters, fixed = self._versions.masters.values(), self.states.fixed.values()
        own = {t.untyped_storage().data_ptr() for t in (*masters, *fixed)}
        return {
            n: r.clone() if isinstance(r, torch.Tensor) and r.untyped_storage().data_ptr() in own else r
            for n, r in results.items()
        }


def _leads_back(tensor: torch.Tensor, ends: Container[int]) -> bool:
    """Whether a gradient can flow from this value back to an activation or a weight (`ends`, by identity), or the value
    is itself one of these. A view taken under no_grad requires a gradient by its flag, and leads nowhere."""
    return tensor.requires_grad and (tensor.grad_fn is not None or id(tensor) in ends)

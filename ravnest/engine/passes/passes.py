"""Forward and backward passes of a stage, and the data that it keeps of each microbatch between them.

While a microbatch travels to the leaf and back, earlier microbatches update the stage's weights. A backward that
combined the new weights with the activations of the old ones would compute the gradient of no model. The version policy
(version_policy.py, `pipeline.versions`) therefore decides what a stage keeps for the backward:

    stash       the weights that the forward used, and its activations (PipeDream's weight stashing)
    double      the same; at most as many microbatches are in flight as make an update, so at most two versions exist
    recompute   the weights and the inputs of the stage; the forward is recomputed for the backward
    stash_8bit  its activations, and in 8 bits the weights of the forward that the backward needs
    in_place    its activations; the backward reads the latest weights, so no weights are copied
    latest      only the inputs; the forward is recomputed with the latest weights, so no weights are copied

The gradient is exact for the weights that the backward uses, with two exceptions (passes/saved_weights.py). With
"stash_8bit" those weights have a rounding error. With "in_place" the activations are those of other weights: as in
PipeMare (Yang et al., 2021), an error of the size of the updates in between. With predicted weights, which predict
the weights that the backward finds, it is the error of the prediction. On a leaf the backward follows its forward
immediately, so a leaf keeps everything under any policy.

A recomputed forward equals the first one bit for bit: random operators are seeded by the microbatch, and the states
that the model changes are copies from before the first forward. The first forward also runs with gradients enabled, and
its saved tensors are freed immediately: without gradients torch selects other kernels for some operators, and dropout
or the last digit could differ. The peak memory does not grow, because a backward takes as much.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ravnest.engine.finite_checks.origin import ForwardDiagnosis, diagnose_forward
from ravnest.engine.passes.precision import Precision
from ravnest.engine.passes.saved_weights import CodedWeights, CurrentWeights, SavedWeights
from ravnest.engine.passes.split_backward import Gradients, SplitBackward
from ravnest.engine.settings import StageSettings
from ravnest.engine.weights.model_states import ModelStates
from ravnest.engine.weights.versions import Version, WeightVersions
from ravnest.errors import TrainingError
from ravnest.graph.aliasing import Aliases, written_names
from ravnest.graph.portable import PortableGraph
from ravnest.graph.program import Program, WeightUse
from ravnest.graph.weight_uses import unread_weights
from ravnest.version_policy import POLICIES


@dataclass(slots=True)
class _Computed:
    """A computed forward, ready for its backward."""

    received: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    apart: list[WeightUse]


@dataclass(slots=True)
class _SavedForward:
    """Data that is kept of a microbatch between its forward and its backward."""

    number: int
    """Number of the version that the forward used."""
    version: Version | None
    """Held until the backward; None: the backward uses the latest weights."""
    computed: _Computed | None
    """None: the forward is recomputed from `given` and `states`."""
    given: dict[str, Any]
    states: dict[str, torch.Tensor]
    again: bool
    """True: the microbatch was applied before, and needs no gradients of weights."""
    coded: CodedWeights | None = None
    """The weights of the forward, if it is recomputed with them."""


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """A backward whose weight gradients have not been taken yet; holds only the part of the graph that they need."""

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
    """Activations, or looked-up rows, that the stage that sent them wants gradients for."""
    outputs: frozenset[str]
    """Values that a gradient may arrive for: the loss, or the values that the stage after sends gradients of."""
    written: tuple[str, ...]
    """Inputs and activations that the graph writes in place."""
    sent_types: Mapping[str, torch.dtype | None]

    @classmethod
    def from_graph(cls, graph: PortableGraph) -> "_Signature":
        aliases = Aliases(graph)
        written_groups = {aliases.group(name) for node in graph.nodes for name in written_names(node)}
        given = tuple(v.name for v in (*graph.inputs, *graph.from_stages))
        outputs = {v.name for v in graph.sends if v.needs_grad} | ({graph.loss} if graph.loss else set())
        return cls(
            given=given,
            received=tuple(v.name for v in graph.from_stages if v.needs_grad),
            outputs=frozenset(outputs),
            written=tuple(name for name in given if aliases.group(name) in written_groups),
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
        """`fixed` holds the constants and states, by name in the graph; each training forward replaces the states.

        With `memory_bytes`, a pass that would exceed it ends with a LentMemoryError before it does.
        """
        policy = POLICIES[settings.versions]
        self.states = ModelStates([s.name for s in graph.states], fixed)
        self._signature = _Signature.from_graph(graph)
        self._program = Program(graph, device, compiled=settings.compiled, memory_bytes=memory_bytes)
        self._precision = Precision(settings.precision, device)
        self._versions = versions
        self._seed = settings.seed
        self._is_leaf = graph.loss is not None
        self._keeps_weights = not policy.writes_in_place or self._is_leaf
        self._codes_weights = policy.coded and not self._is_leaf
        self._keeps_activations = policy.keeps_activations or self._is_leaf
        self._max_saved = settings.accumulate if policy.within_accumulate else None
        can_split = self._program.can_split and not self._precision.scales
        self.splits = settings.split_backward and bool(self._signature.received) and can_split
        """Whether weight gradients are computed separately, after the gradients of the activations."""
        self._saved: dict[int, _SavedForward] = {}
        self._coded: CodedWeights | None = None
        """The current weights, if a forward has used them."""
        versions.on_write = self._before_write
        if self._keeps_weights and self._keeps_activations and not settings.compiled:
            versions.unread = unread_weights(graph)
        self._unfinished: _Unfinished | None = None
        self._last: tuple[int, _SavedForward] | None = None
        """On a leaf, the microbatch of the last backward, until its gradients are applied."""
        self._summed: list[int] = []
        """Microbatches whose weight gradients were taken and are not yet applied."""

    @property
    def is_unfinished(self) -> bool:
        """Whether the weight gradients of the last backward have not been taken yet."""
        return self._unfinished is not None

    @property
    def in_flight(self) -> int:
        """Microbatches between forward and backward here."""
        return len(self._saved)

    @property
    def versions_alive(self) -> int:
        """Number of copies of the weights: those held by microbatches in flight, and the latest."""
        held = [saved.version for saved in self._saved.values() if saved.version]
        # Versions with predicted weights share them.
        return len({self._versions.copy_of(version) for version in (*held, self._versions.current)})

    @property
    def writes_in_place(self) -> bool:
        """Whether no microbatch in flight holds the memory of the weights that its forward used."""
        return not self._keeps_weights

    @property
    def keeps_activations(self) -> bool:
        """Whether the stage keeps activations that it could recompute."""
        return self._keeps_activations and not self._is_leaf

    def start_recomputing(self) -> bool:
        """Stops keeping activations, overriding the policy; returns whether that changes anything.

        Microbatches in flight keep theirs. A leaf recomputes nothing, because its backward follows its forward.
        """
        changes = self.keeps_activations
        if changes:
            self._keeps_activations = False
            # A recomputed forward reads every weight again.
            self._versions.unread = frozenset()
        return changes

    def forward(
        self,
        microbatch: int,
        given: dict[str, Any],
        instead: dict[str, torch.Tensor] | None = None,
        again: bool = False,
    ) -> dict[str, Any]:
        """Training forward: returns the values to send on, by name. The microbatch's backward must follow.

        `instead`: weights to use in place of the current ones, from a correction of staleness. `again`: the microbatch
        was applied before, and must not change the states. TrainingError if the policy allows no more in flight.
        """
        if self._max_saved is not None and len(self._saved) >= self._max_saved:
            raise TrainingError(
                f"microbatch {microbatch} came while {len(self._saved)} are in flight at this stage: with two "
                "versions of the weights, no more microbatches may be in flight than make an update; set "
                "pipeline.in_flight to pipeline.accumulate or less"
            )
        number = self._versions.current.number
        leaves = self._versions.current.leaves if instead is None else instead
        before, states = self.states.current(), self.states.copies()
        fixed = {**self.states.fixed, **states}
        coded = self._coded_weights(instead) if self._codes_weights else None
        if self._keeps_activations:
            if self._keeps_weights:
                computed, sent = self._compute_with_weights(microbatch, given, leaves, fixed)
            else:
                computed, sent = self._compute_without_weights(coded, microbatch, given, leaves, fixed)
            saved = _SavedForward(number, None, computed, given, {}, again)
        else:
            saved = _SavedForward(number, None, None, given, before, again, coded)
            first = {**given, **{name: given[name].clone() for name in self._signature.written}}
            _, sent = self._compute(microbatch, first, leaves, fixed)
            if coded is not None:
                coded.keep_all()
        if coded is not None and instead is not None:
            coded.settle()
        if not again:
            self.states.advance(microbatch, states)
        if self._keeps_weights:
            saved.version = self._versions.acquire(instead)
        self._saved[microbatch] = saved
        return sent if self._keeps_weights else self._copied_if_shared(sent)

    def backward(self, microbatch: int, gradients: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """Returns the gradients for the stage before; `weight_gradients` must follow unless the forward was `again`.

        `gradients` are those that the stage after sent; None on a leaf, which has the loss. TrainingError if the
        microbatch has no forward here.
        """
        saved = self._saved.pop(microbatch, None)
        if saved is None:
            raise TrainingError(f"a gradient for microbatch {microbatch} came, which has no forward here")
        if self._is_leaf:
            # Kept for `diagnose_forward`: the loss is checked only after the backward.
            self._last = microbatch, replace(saved, version=None, computed=None)
        computed = saved.computed
        if computed is None:
            version = saved.version or self._versions.current
            leaves = version.leaves if saved.coded is None else saved.coded.leaves()
            fixed = {**self.states.fixed, **{name: state.clone() for name, state in saved.states.items()}}
            computed, _ = self._compute(microbatch, saved.given, leaves, fixed)
        if gradients is None:
            outputs = list(computed.outputs.values())
            given = [torch.ones_like(tensor) for tensor in outputs]
        else:
            outputs = [tensor for name, tensor in computed.outputs.items() if name in gradients]
            given = [gradients[name] for name in computed.outputs if name in gradients]
        if saved.again:
            self._release(saved.version)
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
        self._unfinished = _Unfinished(microbatch, saved.number, saved.version, computed.weights, weights, split)
        return {n: g for n, g in zip(computed.received, found[:count], strict=True) if g is not None}

    def weight_gradients(self) -> tuple[int, Gradients]:
        """The number of the version that the forward of the last backward used, and its weight gradients by name."""
        assert self._unfinished is not None, "no backward has weight gradients left"
        left, self._unfinished = self._unfinished, None
        found = left.found if left.split is None else left.split.rest(left.weights, left.found)
        self._release(left.version)
        self._summed.append(left.microbatch)
        return left.number, found

    def applied(self) -> None:
        """Notes that all weight gradients taken so far have been applied."""
        self.states.settle(self._summed)
        self._summed.clear()
        self._last = None

    def forget(self) -> None:
        """Discards every microbatch that is not yet applied, and its effect on the states."""
        for saved in self._saved.values():
            self._release(saved.version)
        if self._unfinished is not None:
            self._release(self._unfinished.version)
        self._saved.clear()
        self._unfinished = self._last = self._coded = None
        self.states.forget()
        self._summed.clear()

    def evaluate(self, given: Mapping[str, Any], microbatch: int = 0) -> dict[str, Any]:
        """Evaluation forward with the latest weights: returns the values to send on, the loss and the metrics, by name.

        Random operators that a model runs even in evaluation are seeded by the microbatch, as in training.
        """
        weights = {**self._versions.current.leaves, **self.states.fixed}
        with torch.no_grad():
            results = self._program.run(given, weights, train=False, seed=self._seed, microbatch=microbatch)
        return self._copied_if_shared(results)

    def diagnose_forward(self, microbatch: int) -> ForwardDiagnosis | None:
        """Searches the forward of this microbatch for the origin of values that are not finite. None if its inputs are
        no longer here."""
        saved = self._saved.get(microbatch)
        if saved is None and self._last is not None and self._last[0] == microbatch:
            saved = self._last[1]
        if saved is None or any(name not in saved.given for name in self._signature.given):
            return None
        version = saved.version or self._versions.current
        weights = {**version.leaves, **self.states.fixed, **self.states.copies(instead=saved.states)}
        with self._precision.autocast():
            return diagnose_forward(self._program.graph, self._program, saved.given, weights, self._seed, microbatch)

    def _coded_weights(self, instead: dict[str, torch.Tensor] | None) -> CodedWeights:
        """The version that the next forward uses. Forwards between two updates share that of the current weights, which
        is coded only if an update comes before their backwards."""
        if instead is not None:
            return CodedWeights(instead)
        if self._coded is None:
            self._coded = CodedWeights(self._versions.current.leaves)
        return self._coded

    def _before_write(self) -> None:
        if self._coded is not None and self._saved:
            self._coded.settle()
        self._coded = None

    def _compute_without_weights(
        self,
        coded: CodedWeights | None,
        microbatch: int,
        given: dict[str, Any],
        used: dict[str, torch.Tensor],
        fixed: Mapping[str, torch.Tensor],
    ) -> tuple[_Computed, dict[str, Any]]:
        """Like `_compute`, but the result holds no memory of the weights `used`: its backward gets those of `coded`, or
        the current ones."""
        leaves = {name: weight.detach().requires_grad_() for name, weight in used.items()}
        weights = SavedWeights(leaves, coded or CurrentWeights(lambda: self._versions.current.leaves))
        with weights.saving():
            computed, sent = self._compute(microbatch, given, leaves, fixed)
        current = self._versions.current.leaves
        weights.release((leaf for use in computed.apart for _, leaf in use.weights), current)
        weights.release(leaves.values(), current)
        return computed, sent

    def _compute_with_weights(
        self, microbatch: int, given: dict[str, Any], used: dict[str, torch.Tensor], fixed: Mapping[str, torch.Tensor]
    ) -> tuple[_Computed, dict[str, Any]]:
        """Like `_compute`, but the result holds no memory of the weights that no backward reads, unless it is that of
        the current ones."""
        unread = {name: used[name].detach().requires_grad_() for name in self._versions.unread}
        computed, sent = self._compute(microbatch, given, used | unread, fixed)
        if unread:
            current = self._versions.current.leaves
            weights = SavedWeights(unread, CurrentWeights(lambda: current))
            weights.release((leaf for use in computed.apart for _, leaf in use.weights), current)
            weights.release(unread.values(), current)
        return computed, sent

    def _compute(
        self, microbatch: int, given: dict[str, Any], leaves: dict[str, torch.Tensor], fixed: Mapping[str, torch.Tensor]
    ) -> tuple[_Computed, dict[str, Any]]:
        """The forward, and detached the values to send on."""
        received = {name: given[name].requires_grad_() for name in self._signature.received}
        apart: list[WeightUse] = []
        with torch.enable_grad(), self._precision.autocast():
            results = self._program.run(
                given,
                {**leaves, **fixed},
                train=True,
                seed=self._seed,
                microbatch=microbatch,
                apart=apart if self.splits else None,
            )
            results = self._precision.cast(results, self._signature.sent_types)
        ends = {id(tensor) for tensor in (*received.values(), *leaves.values())}
        outputs = {n: r for n, r in results.items() if n in self._signature.outputs and _leads_back(r, ends)}
        sent = {n: r.detach() if isinstance(r, torch.Tensor) else r for n, r in results.items()}
        return _Computed(received, leaves, outputs, apart), sent

    def _release(self, version: Version | None) -> None:
        if version is not None:
            self._versions.release(version)

    def _copied_if_shared(self, results: dict[str, Any]) -> dict[str, Any]:
        """Copies results that share memory with weights or states, such as a tied parameter that is sent on: training
        must not change them before they are sent."""
        masters, fixed = self._versions.masters.values(), self.states.fixed.values()
        own = {t.untyped_storage().data_ptr() for t in (*masters, *fixed)}
        return {
            n: r.clone() if isinstance(r, torch.Tensor) and r.untyped_storage().data_ptr() in own else r
            for n, r in results.items()
        }


def _leads_back(tensor: torch.Tensor, ends: Container[int]) -> bool:
    """Whether a gradient can flow from this value to an activation or a weight (`ends`, by identity), or the value is
    itself one of these. A view taken under no_grad has `requires_grad` set although no gradient can flow through it."""
    return tensor.requires_grad and (tensor.grad_fn is not None or id(tensor) in ends)

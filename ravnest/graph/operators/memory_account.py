"""Account of the memory that a graph takes, limited to the memory that the provider lends.

Before each call, the account adds the memory that the call may take to the memory of live results, which the graph or
autograd still holds. Beyond the limit the call is a GraphError that names the node, and nothing has been allocated. A
view of a few bytes may have far more elements: the limit applies to its elements, because later kernels process all of
them and gradients have memory for each.
"""

import weakref
from typing import Any

import torch

from ravnest.errors import GraphError, LentMemoryError
from ravnest.graph.operators.calls import Call
from ravnest.graph.operators.sizes import call_bytes, logical_bytes
from ravnest.units import byte_size


class MemoryAccount:
    """Memory of all runs of one graph, including earlier runs whose results autograd still holds."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._given: set[int] = set()
        self._alive_bytes = 0
        self.follows_values = False
        """Whether a shape turned out to depend on the values of a tensor."""
        self._gradient_bytes = 0
        """Memory that gradients will take in excess of the usual amount."""
        self._largest_bytes = 0
        """Size of the largest result with a gradient, and so of the largest gradient."""

    def begin(self, given: Any) -> None:
        """Begin a run with these values, which the stage holds in any case."""
        self._forget_dead()
        self._gradient_bytes = self._largest_bytes = 0
        self._given = {key for key, _ in _storages(given)}

    def expect(self, name: str, call: Call) -> None:
        """GraphError if the call may take more memory than is left."""
        if call.short_name.startswith("index"):
            self.follows_values |= any(t.dtype in (torch.bool, torch.uint8) for t in call.tensors())
        try:
            wanted = call_bytes(call)
        except (ValueError, TypeError, IndexError, AttributeError, ZeroDivisionError, OverflowError, RuntimeError) as e:
            raise GraphError(f"node {name!r} calls {call.op} with arguments that do not fit each other: {e}") from None
        self._hold(name, call, wanted)

    def note(self, name: str, call: Call, result: Any) -> None:
        """Record the result of a call."""
        logical = logical_bytes(result)
        if logical > self.limit_bytes:
            raise LentMemoryError(
                f"node {name!r} ({call.op}) made a tensor of {byte_size(logical)}, but only "
                f"{byte_size(self.limit_bytes)} are lent: use smaller microbatches, or lend more with --memory"
            )
        for key, storage in _storages(result):
            if key in self._given or (key in self._held and self._held[key][0]() is not None):
                continue
            size = storage.nbytes()
            if key in self._held:
                self._alive_bytes -= self._held[key][1]
            self._held[key] = (weakref.ref(storage), size)
            self._alive_bytes += size
        self._gradient_bytes += _more_in_backward(call, result)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            self._largest_bytes = max(self._largest_bytes, result.untyped_storage().nbytes())
        self._hold(name, call, 0)

    def _hold(self, name: str, call: Call, wanted: int) -> None:
        more = self._gradient_bytes + max(wanted, self._largest_bytes)
        if self._alive_bytes + more > self.limit_bytes:
            self._forget_dead()
        total = self._alive_bytes + more
        if total > self.limit_bytes:
            raise LentMemoryError(
                f"node {name!r} ({call.op}) would take the stage to {byte_size(total)} for one microbatch, but only "
                f"{byte_size(self.limit_bytes)} are lent: use smaller microbatches, or lend more with --memory"
            )

    def _forget_dead(self) -> None:
        self._held = {key: held for key, held in self._held.items() if held[0]() is not None}
        self._alive_bytes = sum(size for _, size in self._held.values())


def _more_in_backward(call: Call, result: Any) -> int:
    """Memory that gradients take in excess of the usual amount. A gradient has all elements of its tensor, but a view
    may have less memory than elements: the excess is over three times the memory of the call's tensors."""
    if not torch.is_grad_enabled():
        return 0
    gradients = sum(t.numel() * t.element_size() for t in call.tensors() if t.requires_grad)
    memory = {key: storage.nbytes() for key, storage in _storages((*call.tensors(), result))}
    return max(0, gradients - 3 * sum(memory.values()))


def _storages(value: Any) -> list[tuple[int, torch.UntypedStorage]]:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return []
        storage = value.untyped_storage()
        return [(storage._cdata, storage)]
    if isinstance(value, tuple | list):
        return [found for entry in value for found in _storages(entry)]
    return []

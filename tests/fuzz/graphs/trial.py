"""Trial of one graph, like in a stage: read, forward, backward; twice, with different bytes in fresh memory.

A result that differs between the two runs exposes uninitialised memory. A graph may end with a Python exception. The
surrounding process detects anything else: a signal, a hang, or more memory than was lent.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

import torch

from ravnest.errors import GraphError
from ravnest.graph.operators.memory_account import MemoryAccount
from ravnest.graph.portable_reader import dtype_named, read_graph
from ravnest.graph.program import Program
from ravnest.graph.step import Step
from tests.fuzz.graphs.cases import Case, Given
from tests.fuzz.graphs.memory import GuardedMemory

LENT_BYTES: Final = 64 << 20
SLACK_BYTES: Final = 4 << 20
"""Memory that kernels may use in addition to the lent memory."""


@dataclass
class Found:
    """Result of a trial."""

    wrong: str = ""
    """The broken rule; empty if there is none."""
    ended: str = ""
    """The exception that it ended with, if any."""
    ran: list[str] = field(default_factory=list)
    """Operators that completed."""
    went_back: bool = False
    """Whether a backward completed."""


def run(case: Case, memory: GuardedMemory | None, tell: Callable[[int], None] = lambda place: None) -> Found:
    """Run the case; calls `tell` with the number of each node before it runs, and with -1 before the backward."""
    try:
        graph = read_graph(case.graph_json())
        program = Program(graph, memory_bytes=LENT_BYTES)
    except GraphError as error:
        return Found(ended=f"GraphError: {error}")
    if memory is None:
        return _once(case, program, None, tell)[0]
    memory.fill(0xA5)
    found, first = _once(case, program, memory, tell)
    if found.wrong or (found.ended and not first):
        return found
    memory.fill(0x5B)
    again, second = _once(case, program, memory, tell)
    found.wrong = again.wrong or _difference(first, second)
    return found


def _once(
    case: Case, program: Program, memory: GuardedMemory | None, tell: Callable[[int], None]
) -> tuple[Found, dict[str, bytes]]:
    """The result and the bytes of all outputs, without the inputs and their gradients, which belong to the stage."""
    found = Found()
    leaves, values = {}, {}
    for name, given in case.given.items():
        tensor = _tensor(given)
        if given.grad:
            leaves[name] = tensor.requires_grad_()
        else:
            values[name] = tensor
    places = {node["name"]: place for place, node in enumerate(case.nodes)}
    torch.manual_seed(0)
    if memory is not None:
        memory.forget_peak()
    max_bytes = LENT_BYTES + SLACK_BYTES + sum(leaf.nbytes for leaf in leaves.values())
    bytes_of = _run(program, values, leaves, found, places, tell)
    if memory is not None:
        found.wrong = memory.wrong(max_bytes)
    return found, bytes_of


def _run(
    program: Program,
    values: dict[str, torch.Tensor],
    leaves: dict[str, torch.Tensor],
    found: Found,
    places: dict[str, int],
    tell: Callable[[int], None],
) -> dict[str, bytes]:
    """Forward and backward."""
    try:
        with _watched(places, tell, found):
            results = program.run(values, leaves, train=True, seed=1)
    except Exception as error:
        found.ended = f"{type(error).__name__}: {str(error)[:300]}"
        return {}
    bytes_of: dict[str, bytes] = {}
    outputs = []
    for name, result in results.items():
        for place, tensor in enumerate(result if isinstance(result, list | tuple) else [result]):
            if isinstance(tensor, torch.Tensor):
                bytes_of[f"{name}.{place}"] = _bytes(tensor)
                if _has_backward(tensor):
                    outputs.append(tensor)
    del results
    if outputs and leaves:
        tell(-1)
        names = list(leaves)
        try:
            given = [_gradient(output) for output in outputs]
            gradients = torch.autograd.grad(outputs, [leaves[n] for n in names], given, allow_unused=True)
            bytes_of.update({f"grad of {n}": _bytes(g) for n, g in zip(names, gradients, strict=True) if g is not None})
            found.went_back = True
        except Exception as error:
            found.ended = f"{type(error).__name__}: {str(error)[:300]}"
    return bytes_of


def _has_backward(tensor: torch.Tensor) -> bool:
    try:
        return tensor.requires_grad and tensor.grad_fn is not None and tensor.dtype.is_floating_point
    except RuntimeError:
        # One of several views whose base was written to: autograd refuses its backward.
        return False


def _gradient(output: torch.Tensor) -> torch.Tensor:
    """Gradients as from a later stage. That of a large tensor takes no memory, because it is not part of the test."""
    one = torch.full((), 0.5, dtype=output.dtype).expand(output.shape)
    return one.contiguous() if output.numel() < 1 << 16 else one


@contextlib.contextmanager
def _watched(places: dict[str, int], tell: Callable[[int], None], found: Found) -> Iterator[None]:
    """Report each step of a program before it runs, and record it afterwards."""
    call = Step.call

    def watched(step: Step, env: list[Any], account: MemoryAccount | None = None) -> None:
        tell(places[step.node.name])
        call(step, env, account)
        found.ran.append(step.node.op)

    with mock.patch.object(Step, "call", watched):
        yield


def _bytes(tensor: torch.Tensor) -> bytes:
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    tensor = tensor.detach()
    if tensor.numel() > 1 << 18:
        # An expanded view may be far larger than its memory.
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            tensor = tensor.narrow(dim, 0, 1) if stride == 0 and size else tensor
        tensor = tensor.flatten()[: 1 << 18]
    plain = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.flatten().clone().view(torch.uint8).numpy().tobytes()


def _difference(first: dict[str, bytes], second: dict[str, bytes]) -> str:
    for name in first:
        if first[name] != second.get(name):
            return f"uninitialised memory in {name}"
    return ""


def _tensor(given: Given) -> torch.Tensor:
    dtype = dtype_named(given.dtype)
    if given.values is not None:
        return torch.tensor(given.values, dtype=_widest(dtype)).to(dtype).reshape(given.shape)
    count = math.prod(given.shape)
    return _FILLS[given.fill](count).to(dtype).reshape(given.shape)


def _widest(dtype: torch.dtype) -> torch.dtype:
    """A type in which every value given for this one fits, before it is converted."""
    return dtype if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool else torch.int64


def _normal(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count + 1))


_FILLS: Final[dict[str, Callable[[int], torch.Tensor]]] = {
    "normal": _normal,
    "zeros": torch.zeros,
    "ones": torch.ones,
    "nan": lambda count: torch.full((count,), math.nan),
    "inf": lambda count: torch.full((count,), math.inf),
    "huge": lambda count: _normal(count).double() * 1e18,
    "small": lambda count: torch.arange(count) % 3,
    "hostile": lambda count: torch.tensor([-1, 2**31, 5, -(2**40), 2**62, 0, 1, 2**20])[torch.arange(count) % 8],
    "negative": lambda count: -torch.arange(count) - 1,
}

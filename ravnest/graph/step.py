"""Step: one node of a portable graph, prepared for calls: its operator, its arguments, and the checks before a call.

A call that would crash the operator's kernel, or take more memory than is lent, is a GraphError that names the node;
the operator is then not called.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ravnest.errors import GraphError
from ravnest.graph import ops
from ravnest.graph.operators.calls import Call
from ravnest.graph.operators.computed import misfit
from ravnest.graph.operators.guards import refusal, shape_follows_values, shape_guard, value_guard
from ravnest.graph.operators.memory_account import MemoryAccount
from ravnest.graph.operators.signatures import parameters_of
from ravnest.graph.own_gradient import with_own_gradient
from ravnest.graph.portable import Argument, Backward, Device, Node, Ref
from ravnest.graph.switch import draws_random_numbers


class Step:
    """One node with its arguments prepared: constants in place, references as (position, slot)."""

    __slots__ = (
        "_args",
        "_grad",
        "_kwargs",
        "_nested",
        "_parameters",
        "_refs",
        "_shape_guard",
        "_slot_kwargs",
        "_value_guard",
        "follows_values",
        "frees",
        "function",
        "node",
        "seed",
        "slot",
    )

    def __init__(
        self, node: Node, slots: Mapping[str, int], device: torch.device, frees: tuple[int, ...], memory_bytes: int
    ) -> None:
        """`memory_bytes` limits the backward pass of a `py.own_gradient` node."""
        self.node = node
        self.seed = node.seed if draws_random_numbers(node) else None
        self.frees = frees
        self.function = function_of(node, device, memory_bytes)
        self._shape_guard = shape_guard(node.op)
        self._value_guard = value_guard(node.op, node.args[1] if len(node.args) > 1 else node.kwargs.get("other"))
        self._parameters = () if ops.is_python(node.op) else parameters_of(self.function)
        self.follows_values = shape_follows_values(node.op)
        self._grad = node.grad
        self.slot = slots[node.name]
        self._args: list[Any] = [_constant(a, device) for a in node.args]
        self._refs = tuple((i, slots[a.name]) for i, a in enumerate(node.args) if isinstance(a, Ref))
        self._nested = tuple(
            (i, _resolver(a, slots, device))
            for i, a in enumerate(node.args)
            if isinstance(a, tuple) and _has_reference(a)
        )
        self._kwargs = {k: _constant(a, device) for k, a in node.kwargs.items()}
        self._slot_kwargs = tuple((k, _resolver(a, slots, device)) for k, a in node.kwargs.items() if _has_reference(a))

    @property
    def needs_its_checks(self) -> bool:
        """Whether the values of its tensors may make a call invalid or determine the sizes of its results."""
        return self._value_guard is not None or self.follows_values

    def arguments(self, env: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        args = self._args.copy()
        for position, slot in self._refs:
            args[position] = env[slot]
        for position, resolve in self._nested:
            args[position] = resolve(env)
        if not self._slot_kwargs:
            return args, self._kwargs
        return args, {**self._kwargs, **{k: resolve(env) for k, resolve in self._slot_kwargs}}

    def call(self, env: list[Any], account: MemoryAccount | None = None) -> None:
        """Run the operator after the checks that its kernel does not make itself; GraphError if one of them fails.

        With an account, computed arguments are checked as well, and the call's memory is charged to the account.
        """
        args, kwargs = self.arguments(env)
        call = None
        if account is not None or self._value_guard is not None:
            call = self._checked(args, kwargs, account)
        if self._grad:
            env[self.slot] = self.function(*args, **kwargs)
        else:
            with torch.no_grad():
                env[self.slot] = self.function(*args, **kwargs)
        if call is not None and account is not None:
            account.note(self.node.name, call, env[self.slot])

    def _checked(self, args: list[Any], kwargs: dict[str, Any], account: MemoryAccount | None) -> Call | None:
        """The valid call; None for arithmetic on sizes, which checks its own arguments."""
        if not self._parameters:
            return None
        call = Call(self.node.op, self._parameters, args, kwargs)
        reason = ""
        if account is not None:
            reason = misfit(call) or refusal(self._shape_guard, call)
        reason = reason or refusal(self._value_guard, call)
        if reason:
            raise GraphError(f"node {self.node.name!r} calls {self.node.op} and {reason}")
        if account is not None:
            account.expect(self.node.name, call)
        return call


class BackwardPass:
    """The backward pass of one node, as steps over slots of its own: gradients, saved values, results.

    Autograd calls it outside the run of the program, so it checks each call itself and has a memory account of its own.
    """

    def __init__(self, backward: Backward, device: torch.device, memory_bytes: int) -> None:
        self._account = MemoryAccount(memory_bytes)
        given = (*backward.gradients, *backward.saved)
        slots = {name: i for i, name in enumerate((*given, *(n.name for n in backward.nodes)))}
        self._results = [None if name is None else slots[name] for name in backward.yields]
        self._room = len(slots) - len(given)
        last_use: dict[int, int] = {}
        for i, node in enumerate(backward.nodes):
            last_use.update({slots[name]: i for name in (node.name, *node.references())})
        frees: list[list[int]] = [[] for _ in backward.nodes]
        for slot, i in last_use.items():
            if slot not in self._results:
                frees[i].append(slot)
        self._steps = [
            Step(n, slots, device, tuple(f), memory_bytes) for n, f in zip(backward.nodes, frees, strict=True)
        ]

    def __call__(self, given: Sequence[Any]) -> list[Any]:
        env = [*given, *[None] * self._room]
        self._account.begin(list(given))
        for step in self._steps:
            step.call(env, self._account)
            for slot in step.frees:
                env[slot] = None
        return [None if slot is None else env[slot] for slot in self._results]


def function_of(node: Node, device: torch.device, memory_bytes: int) -> Callable[..., Any]:
    """The function that the node calls: its operator, with its own backward pass if it has one."""
    if node.backward is None:
        return ops.resolve(node.op)
    return with_own_gradient(node, BackwardPass(node.backward, device, memory_bytes))


def _has_reference(argument: Argument) -> bool:
    return isinstance(argument, Ref) or (isinstance(argument, tuple) and any(_has_reference(a) for a in argument))


def _constant(argument: Argument, device: torch.device) -> Any:
    if isinstance(argument, Device):
        return device
    if isinstance(argument, tuple):
        return [_constant(a, device) for a in argument]
    return argument


def _resolver(argument: Argument, slots: Mapping[str, int], device: torch.device) -> Callable[[list[Any]], Any]:
    if isinstance(argument, Ref):
        slot = slots[argument.name]
        return lambda env: env[slot]
    if isinstance(argument, tuple):
        parts = [_resolver(a, slots, device) for a in argument]
        return lambda env: [part(env) for part in parts]
    constant = _constant(argument, device)
    return lambda env: constant

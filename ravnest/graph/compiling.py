"""Compilation of a graph with torch.compile, for the stage's device.

No text that a peer sent becomes source code: values get new names by number, and the operators are those of the
allow-list. A compiled dropout draws other random numbers than an uncompiled one, but the same ones each time that a
microbatch runs. A graph that cannot be compiled on this machine runs uncompiled, with a warning.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo.exc
import torch._inductor.exc
from torch import fx

from ravnest.graph import ops
from ravnest.graph.portable import Argument, Device, Node, Ref

_COMPILER_ERRORS = (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError)


def as_module(
    nodes: Iterable[Node], given: Sequence[str], outputs: Sequence[str], device: torch.device
) -> fx.GraphModule:
    """The nodes as a function from the values named in `given`, in order, to the outputs, in order."""
    graph = fx.Graph()
    values: dict[str, fx.Node] = {name: graph.placeholder(f"g{i}") for i, name in enumerate(given)}
    recording = True
    for number, node in enumerate(nodes):
        if node.grad is not recording:
            graph.create_node("call_function", torch._C._set_grad_enabled, (node.grad,), name=f"grad{number}")
            recording = node.grad
        args = tuple(_argument(a, values, device) for a in node.args)
        kwargs = {name: _argument(a, values, device) for name, a in node.kwargs.items()}
        made = graph.create_node("call_function", ops.compilable(node.op), args, kwargs, name=f"v{number}")
        values[node.name] = made
    if not recording:
        graph.create_node("call_function", torch._C._set_grad_enabled, (True,), name="grad")
    graph.output(tuple(values[name] for name in outputs))
    return fx.GraphModule(torch.nn.Module(), graph)


class Compiled:
    """A function that is compiled at its first call, and again when shapes change in more than the batch size.

    If compilation fails, for example because the machine has no compiler, it runs uncompiled and `failure` says why.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.failure = ""
        self._module = module
        self._function: Callable[..., tuple[Any, ...]] = torch.compile(module)

    def __call__(self, *given: Any) -> tuple[Any, ...]:
        if self.failure:
            return self._module(*given)  # type: ignore[no-any-return]
        try:
            results = self._function(*given)
        except _COMPILER_ERRORS as error:
            self.failure = str(error).strip().splitlines()[0][:200]
            warnings.warn(f"this stage runs uncompiled: {self.failure}", stacklevel=2)
            return self._module(*given)  # type: ignore[no-any-return]
        return results


def _argument(argument: Argument, values: Mapping[str, fx.Node], device: torch.device) -> Any:
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, Device):
        return device
    if isinstance(argument, tuple):
        return [_argument(a, values, device) for a in argument]
    return argument

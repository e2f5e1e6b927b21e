"""A graph as one function for torch.compile, which makes code for the device at hand of it.

Nothing of what a peer sent becomes source: the values are numbered anew, and the operators are those of the allow-list.
A compiled dropout draws other numbers than one that is not compiled, the same ones whenever a microbatch runs.
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
    """A function of what is `given`, in order, that yields the outputs, in order."""
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
    """The same function, compiled at its first call, and again for shapes that differ in more than a batch's size.

    Where that cannot be done here, because there is no compiler say, it runs as it is, and `failure` says why.
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

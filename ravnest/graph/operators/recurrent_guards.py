"""Guards of recurrent layers: their kernels read the sizes of one tensor and assume them for all states and weights."""

import itertools
from collections.abc import Callable
from typing import Final

import torch

from ravnest.graph.operators.calls import Call

_GATES: Final = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _shapes(call: Call) -> str:
    packed = call.op.endswith(".data")
    own = call["data" if packed else "input"]
    if own.dim() != (2 if packed else 3):
        return f"gives an input of {own.dim()} dimensions"
    if own.numel() == 0:
        return "gives an input without elements"
    batch_first = bool(call["batch_first"])
    batch = None if packed else own.shape[0 if batch_first else 1]
    if packed:
        sizes = call["batch_sizes"]
        if sizes.dim() != 1 or sizes.dtype is not torch.int64 or sizes.device.type != "cpu" or not sizes.numel():
            return "gives batch sizes that are not a list of integers on the CPU"
    states = call["hx"] if call.short_name == "lstm" else [call["hx"]]
    if len(states) != (2 if call.short_name == "lstm" else 1) or any(s.dim() != 3 for s in states):
        return "gives initial states of the wrong number or dimensions"
    return _weights_misfit(call, own, list(states), batch)


def _weights_misfit(call: Call, own: torch.Tensor, states: list[torch.Tensor], batch: int | None) -> str:
    gates, params = _GATES[call.short_name], call["params"]
    directions = 2 if call["bidirectional"] else 1
    layers = call.number("num_layers", 1)
    hidden = states[-1].shape[2]
    given_back = states[0].shape[2]
    projects = given_back != hidden
    each = 2 + 2 * bool(call["has_biases"]) + projects
    if layers * directions * each != len(params):
        return f"gives {len(params)} weights instead of {layers * directions * each}"
    if not 0 <= (call["dropout"] or 0.0) <= 1:
        return "gives a dropout probability that is not between 0 and 1"
    for state, width in zip(states, (given_back, hidden), strict=False):
        if state.shape[0] != layers * directions or state.shape[2] != width or state.numel() == 0:
            return "gives an initial state of the wrong size"
        if batch is not None and state.shape[1] != batch:
            return "gives an initial state of another batch size"
    if len({s.shape[1] for s in states}) != 1:
        return "gives initial states of different batch sizes"
    tensors = [own, *states, *params]
    # Autocast converts them to one type.
    types = {t.dtype for t in tensors if not torch.is_autocast_enabled(own.device.type)}
    if len(types) > 1 or any(not t.is_floating_point() or t.device != own.device for t in tensors):
        return "mixes element types or devices"
    for place in range(layers * directions):
        width = own.shape[-1] if place < directions else given_back * directions
        expected: list[tuple[int, ...]] = [(gates * hidden, width), (gates * hidden, given_back)]
        expected += [(gates * hidden,)] * 2 if call["has_biases"] else []
        expected += [(given_back, hidden)] if projects else []
        for weight, shape in zip(params[place * each : (place + 1) * each], expected, strict=True):
            if tuple(weight.shape) != shape:
                return f"gives a weight of shape {tuple(weight.shape)} instead of {shape}"
    return ""


def _packed_sizes(call: Call) -> str:
    """Checks the batch size of each step: the sizes never increase, and their sum is the input's size."""
    sizes, own = call["batch_sizes"], call["data"]
    states = call["hx"] if call.short_name == "lstm" else [call["hx"]]
    steps = sizes.tolist()
    falls = all(later <= earlier for earlier, later in itertools.pairwise(steps))
    if not falls or steps[-1] < 1 or sum(steps) != own.shape[0] or any(s.shape[1] != steps[0] for s in states):
        return "gives batch sizes that do not fit its input"
    return ""


SHAPES: Final[dict[str, Callable[[Call], str]]] = dict.fromkeys(_GATES, _shapes)
VALUES: Final[dict[str, Callable[[Call], str]]] = {f"{name}.data": _packed_sizes for name in _GATES}

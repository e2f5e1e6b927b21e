"""Random graphs: chains of valid operator calls with one or two hostile changes.

A case depends on its number alone. Each graph begins with the next operator of the allow-list, so that all of them are
tried; further nodes take existing values of matching types.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from ravnest.graph import ops
from ravnest.graph.operators.allowed import OVERLOADS
from ravnest.graph.ops import OWN_GRADIENT
from ravnest.graph.portable import FORMAT_VERSION

CALLS: Final[dict[str, list[Any]]] = {
    f"aten.{name}": calls for name, calls in json.loads((Path(__file__).parent / "calls.json").read_text()).items()
}
"""Valid calls of every allowed operator; a tensor is `{"t": [element type, shape, values or null]}`."""
OPERATORS: Final = sorted(OVERLOADS)
_SOBER: Final = [op for op in OPERATORS if not ops.is_random(op) and not ops.written_arguments(op)]
"""Operators that a backward pass may call: they draw no random numbers and write into no argument."""

_NUMBERS: Final = (
    *(0, 1, -1, 2, 3, 4, 5, 7, 8, -2, -3, 16, 63, 64, 65, 127, 128, 255, 1000, 2**15, 2**20, 2**24, 2**31 - 1, 2**31),
    *(-(2**31), 2**32, 2**40, 2**62, 2**63 - 1, -(2**63), 2**63, 10**30),
)
_REALS: Final[tuple[Any, ...]] = (
    *(0.0, 1.0, -1.0, 0.5, 2.0, 1e-30, 1e30, 1e308, -1e308),
    *({"float": "inf"}, {"float": "-inf"}, {"float": "nan"}),
)
_DTYPES: Final = (
    *("float32", "float64", "float16", "bfloat16", "complex64", "bool", "uint8", "int8", "int16", "int32", "int64"),
)
_TEXTS: Final = (
    "mean",
    "sum",
    "none",
    "reflect",
    "circular",
    "constant",
    "replicate",
    "same",
    "floor",
    "cuda:0",
    "tanh",
)
_FILLS: Final = ("normal", "normal", "zeros", "nan", "inf", "huge", "small", "hostile", "ones", "negative")
_MORE: Final = (
    *("aten.expand.default", "aten.select.int", "aten.transpose.int", "aten.view.default", "aten.slice.Tensor"),
    *("aten.detach.default", "aten.fill_.Scalar", "aten.mul_.Tensor", "aten.add_.Tensor", "aten.copy_.default"),
    *(
        "aten.clone.default",
        "aten.reshape.default",
        "aten.flatten.using_ints",
        "aten.zero_.default",
        "aten.stack.default",
    ),
    *(
        "aten.cat.default",
        "aten.index_select.default",
        "aten.unfold.default",
        "aten.repeat.default",
        "aten.index_put_.default",
    ),
)


@dataclass
class Given:
    """An input tensor of a graph."""

    dtype: str
    shape: list[int]
    values: Any = None
    """The values as nested lists; None: made by `fill`."""
    fill: str = "normal"
    grad: bool = False


@dataclass
class Case:
    """A graph in JSON, and its inputs."""

    number: int
    given: dict[str, Given] = field(default_factory=dict)
    nodes: list[dict[str, Any]] = field(default_factory=list)

    def operators(self) -> list[str]:
        return [node["op"] for node in self.nodes]

    def to_json(self) -> str:
        return json.dumps(
            {"number": self.number, "given": {n: vars(g) for n, g in self.given.items()}, "nodes": self.nodes}
        )

    @classmethod
    def from_json(cls, text: str) -> "Case":
        data = json.loads(text)
        given = {name: Given(**fields) for name, fields in data["given"].items()}
        return cls(data["number"], given, data["nodes"])

    def graph_json(self) -> str:
        weights, inputs = [], []
        for name, given in self.given.items():
            if given.grad:
                weights.append({"name": name, "key": name, "dtype": given.dtype, "shape": given.shape})
            else:
                inputs.append({"name": name, "dtype": given.dtype, "shape": given.shape, "needs_grad": False})
        sends = [{"name": n["name"], "dtype": "float32", "shape": [], "needs_grad": True} for n in self.nodes]
        return json.dumps(
            {
                **{
                    "format": "ravnest.graph",
                    "version": FORMAT_VERSION,
                    "inputs": inputs,
                    "receives": [],
                    "sends": sends,
                },
                **{"parameters": weights, "constants": [], "states": [], "nodes": self.nodes},
                **{"loss": None, "metrics": {}},
            }
        )


def case(number: int) -> Case:
    """The case with this number."""
    random = Random(number)
    made = Case(number)
    _add(made, OPERATORS[number % len(OPERATORS)], random, reuse=0.0)
    for _ in range(random.choice((0, 0, 1, 2, 3, 5))):
        _add(made, random.choice(_MORE if random.random() < 0.5 else OPERATORS), random, reuse=0.7)
    if random.random() < 0.08:
        _bring_backward(made, random)
    for _ in range(random.choice((0, 1, 1, 1, 2, 3))):
        _change(made, random)
    return made


def _bring_backward(made: Case, random: Random) -> None:
    """Add a node with a backward pass: a graph of its own, on the incoming gradient and on saved values."""
    known = [n["name"] for n in made.nodes] + list(made.given)
    trained = [name for name, given in made.given.items() if given.grad]
    value = random.choice(trained if trained and random.random() < 0.9 else known)
    gradient = made.given.get(value, Given("float32", [2, 3]))
    saved = {f"s{place}": random.choice(known) for place in range(random.randrange(3))}
    inner = Case(made.number, {"d": gradient, **{name: Given("float32", [2, 3]) for name in saved}})
    for _ in range(random.choice((1, 1, 2, 3))):
        _add(inner, random.choice(_SOBER if random.random() < 0.95 else OPERATORS), random, reuse=0.7)
    if random.random() < 0.5:
        _change(inner, random)
    for name in [name for name in inner.given if name != "d" and name not in saved]:
        # Further inputs of the backward pass become inputs of the whole graph, and are saved.
        saved[name] = f"g{len(made.given)}"
        made.given[saved[name]] = inner.given[name]
    for node in inner.nodes:
        node.pop("seed", None)
    yields = [random.choice(["d", *(node["name"] for node in inner.nodes)])]
    backward = {"gradients": ["d"], "saved": list(saved), "nodes": inner.nodes, "yields": yields}
    lists = [
        [{"ref": value}],
        [{"ref": value if random.random() < 0.9 else random.choice(known)}],
        [{"ref": name} for name in saved.values()],
    ]
    name = f"n{len(made.nodes)}"
    made.nodes.append({"name": name, "op": OWN_GRADIENT, "args": lists, "kwargs": {}, "backward": backward})
    made.nodes.append({"name": f"n{len(made.nodes)}", "op": "py.getitem", "args": [{"ref": name}, 0]})


def _add(made: Case, op: str, random: Random, reuse: float) -> None:
    args, kwargs = random.choice(CALLS[op])
    arguments = [_filled(made, a, random, reuse) for a in args]
    named = {k: _filled(made, a, random, reuse) for k, a in kwargs.items() if k != "pin_memory"}
    node: dict[str, Any] = {"name": f"n{len(made.nodes)}", "op": op, "args": arguments, "kwargs": named}
    if random.random() < 0.5:
        node["seed"] = len(made.nodes)
    if random.random() < 0.05:
        node["grad"] = False
    made.nodes.append(node)
    several = _result_count(op)
    if several:
        made.nodes.append(
            {
                "name": f"n{len(made.nodes)}",
                "op": "py.getitem",
                "args": [{"ref": node["name"]}, random.randrange(several)],
            }
        )


_SEVERAL: dict[str, int] = {}


def _result_count(op: str) -> int:
    """The number of results of an operator whose results are picked one by one; otherwise 0."""
    if op not in _SEVERAL:
        returns = ops.resolve(op)._schema.returns  # type: ignore[attr-defined]
        is_list = len(returns) == 1 and str(returns[0].type).startswith("List")
        _SEVERAL[op] = 2 if is_list else len(returns) if len(returns) > 1 else 0
    return _SEVERAL[op]


def _filled(made: Case, argument: Any, random: Random, reuse: float) -> Any:
    if isinstance(argument, list):
        return [_filled(made, a, random, reuse) for a in argument]
    if not isinstance(argument, dict) or "t" not in argument:
        return argument
    dtype, shape, values = argument["t"]
    real = dtype.startswith(("float", "bfloat"))
    if random.random() < reuse and (real or random.random() < 0.3):
        names = [n["name"] for n in made.nodes] + list(made.given)
        if names:
            return {"ref": random.choice(names)}
    name = f"g{len(made.given)}"
    fill = "normal" if random.random() < 0.85 else random.choice(_FILLS)
    made.given[name] = Given(dtype, list(shape), values, fill, grad=real and random.random() < 0.6)
    return {"ref": name}


def _change(made: Case, random: Random) -> None:
    """Change one detail of the graph or of its inputs."""
    if made.given and random.random() < 0.45:
        _change_given(random.choice(list(made.given.values())), random)
        return
    node = random.choice(made.nodes)
    if random.random() < 0.03:
        node["op"] = random.choice(OPERATORS)
    elif node.get("kwargs") and random.random() < 0.3:
        key = random.choice(list(node["kwargs"]))
        node["kwargs"][key] = _changed(node["kwargs"][key], made, random)
    elif node["args"]:
        place = random.randrange(len(node["args"]))
        node["args"][place] = _changed(node["args"][place], made, random)


def _change_given(given: Given, random: Random) -> None:
    kind = random.random()
    if kind < 0.45 and given.values is not None and random.random() < 0.7:
        given.values = _changed_values(given.values, random)
    elif kind < 0.6:
        given.values, given.fill = None, random.choice(_FILLS)
    elif kind < 0.75:
        given.values, given.dtype = None, random.choice(_DTYPES)
        given.grad = given.grad and given.dtype.startswith(("float", "bfloat"))
    elif given.shape and random.random() < 0.8:
        given.values = None
        place = random.randrange(len(given.shape))
        size = given.shape[place]
        given.shape[place] = random.choice((0, 1, size + 1, max(0, size - 1), size * 7, 2 * size, 33))
    elif random.random() < 0.5:
        given.values = None
        given.shape.insert(random.randrange(len(given.shape) + 1), random.choice((0, 1, 2)))
    else:
        given.values = None
        del given.shape[: random.choice((1, 1, 2))]


def _changed_values(values: Any, random: Random) -> Any:
    if isinstance(values, list):
        if not values:
            return values
        place = random.randrange(len(values))
        return [_changed_values(v, random) if i == place else v for i, v in enumerate(values)]
    if isinstance(values, bool):
        return not values
    if isinstance(values, int):
        changed = random.choice((-1, 0, 1, values + 1, values - 1, 100, 10**6, -100, 2**31, 2**40, 2**62, -(2**63)))
        return max(-(2**63), min(2**63 - 1, changed))
    return random.choice((0.0, -1.0, 1e30, 2.0, -1e30))


def _changed(argument: Any, made: Case, random: Random) -> Any:
    if random.random() < 0.06:
        return random.choice((None, True, False, random.choice(_NUMBERS), [], [1, 1], random.choice(_TEXTS)))
    if isinstance(argument, bool):
        return not argument
    if isinstance(argument, int):
        return argument + random.choice((-1, 1, 2)) if random.random() < 0.4 else random.choice(_NUMBERS)
    if isinstance(argument, float):
        return random.choice(_REALS)
    if isinstance(argument, str):
        return random.choice(_TEXTS)
    if isinstance(argument, list):
        return _changed_list(argument, made, random)
    if isinstance(argument, dict) and "ref" in argument:
        names = list(made.given) + [n["name"] for n in made.nodes]
        return {"ref": random.choice(names)} if random.random() < 0.8 else random.choice((None, 1, 0.5))
    if isinstance(argument, dict) and "dtype" in argument:
        return {"dtype": random.choice(_DTYPES)}
    if argument is None:
        names = list(made.given)
        other = {"ref": random.choice(names)} if names else 1
        return random.choice((other, other, random.choice(_NUMBERS), random.choice(_REALS), [1], True))
    return random.choice((None, random.choice(_NUMBERS), {"memory_format": "channels_last"}, {"dtype": "float64"}))


def _changed_list(argument: list[Any], made: Case, random: Random) -> list[Any]:
    kind = random.random()
    if not argument or kind < 0.1:
        return [*argument, random.choice(argument) if argument else random.choice(_NUMBERS[:12])]
    if kind < 0.2:
        return argument[:-1]
    if kind < 0.25:
        return [argument[0]] * random.choice((1, 2, 3, 6))
    place = random.randrange(len(argument))
    return [_changed(a, made, random) if i == place else a for i, a in enumerate(argument)]

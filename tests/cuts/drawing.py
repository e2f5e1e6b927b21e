"""Random portable graphs: small models with everything that partition has to handle.

Each drawn operator runs immediately on two batches of different sizes, and is kept if torch accepts it. So the shapes,
element types and `needs_grad` of all values are those of the real results. The same state of a `Random` draws the same
graph.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

import torch

from ravnest.graph import ops
from ravnest.graph.aliasing import Aliases, written_names
from ravnest.graph.portable import Argument, Node, PortableGraph, Ref, ValueSpec, WeightSpec
from ravnest.graph.program import Program
from ravnest.graph.switch import draws_random_numbers

SIZES: Final = (5, 3)
"""Sizes of the two batches."""
WIDTH: Final = 4
LENGTH: Final = 3
ROWS: Final = 6
"""Rows of an embedding."""
_DTYPE: Final = torch.float64
"""Precise enough that a wrong gradient differs by far more than a different order of the same sums."""

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Drawn:
    """A random graph with weights and two batches."""

    graph: PortableGraph
    weights: Mapping[str, torch.Tensor]
    """By key."""
    batches: tuple[Batch, ...]


class NotAModelError(Exception):
    """The drawn graph cannot be trained or evaluated at all: its loss has no gradient for any parameter, or torch
    refuses a write in place."""


def drawn(random: Random, operators: int) -> Drawn:
    """A graph with about this many operators before its loss; NotAModelError if it cannot be trained."""
    drawing = _Drawing(random)
    for _ in range(operators):
        drawing.grow()
    try:
        found = drawing.finished()
        weights = {spec.name: found.weights[spec.key].clone() for spec in found.graph.weights}
        # In evaluation dropout is absent, and torch may refuse to write into the value before it.
        with torch.no_grad():
            Program(found.graph).run(found.batches[0], weights, train=False)
    except (IndexError, RuntimeError) as error:
        raise NotAModelError from error
    return found


class _Drawing:
    def __init__(self, random: Random) -> None:
        self.random = random
        generator = torch.Generator().manual_seed(random.randrange(1 << 30))
        self.generator = generator
        self.batches: tuple[Batch, ...] = tuple(_batch(size, generator) for size in SIZES)
        self.env: list[dict[str, Any]] = [{n: t.clone() for n, t in batch.items()} for batch in self.batches]
        self.inputs = tuple(_spec(name, values, False) for name, values in _pairs(*self.batches))
        self.weights: dict[str, torch.Tensor] = {}
        self.kinds: dict[str, str] = {}
        """Kind of each weight by its name: parameter, frozen or buffer."""
        self.nodes: list[Node] = []
        self.grad = True

    # Choices among the existing values.

    def values(self, fits: Callable[[Any], bool] | None = None) -> list[str]:
        """Names of the existing tensors that fit, newest first."""
        found = [
            name
            for name, value in reversed(self.env[0].items())
            if isinstance(value, torch.Tensor) and (fits is None or fits(value))
        ]
        return found

    def floats(self, dims: tuple[int, ...] = (2, 3)) -> list[str]:
        return self.values(lambda v: v.is_floating_point() and v.dim() in dims and v.shape[0] == SIZES[0])

    def any_of(self, names: list[str]) -> str:
        """One of these: the newer of two random choices, so that graphs are long rather than wide."""
        if not names:
            raise IndexError("nothing fits")
        return names[min(self.random.randrange(len(names)), self.random.randrange(len(names)))]

    def value(self, name: str) -> Any:
        return self.env[0][name]

    # New values.

    def weight(self, shape: tuple[int, ...], kind: str = "parameter") -> str:
        """A new weight, or an existing one of the same kind and shape, which is then tied."""
        tied = [n for n, k in self.kinds.items() if k == kind and self.value(n).shape == shape]
        if tied and self.random.random() < 0.4:
            return self.any_of(tied)
        name = f"w{len(self.kinds)}"
        tensor = 0.5 * torch.randn(shape, generator=self.generator, dtype=_DTYPE)
        self.kinds[name] = kind
        self.weights[name] = tensor
        for env in self.env:
            env[name] = tensor.clone().requires_grad_(kind == "parameter")
        return name

    def number_buffer(self) -> str:
        name = f"w{len(self.kinds)}"
        self.kinds[name] = "buffer"
        self.weights[name] = torch.tensor(3)
        for env in self.env:
            env[name] = torch.tensor(3)
        return name

    def add(self, op: str, *args: Argument, **kwargs: Argument) -> str:
        """Run the operator on both batches; returns its name. An error of torch is raised."""
        name = f"n{len(self.nodes)}"
        node = Node(name, op, args, kwargs, self.grad)
        node = replace(node, seed=0 if draws_random_numbers(node) else None)
        found = []
        for env in self.env:
            with torch.set_grad_enabled(self.grad):
                found.append(ops.resolve(op)(*_filled(args, env), **{k: _filled(a, env) for k, a in kwargs.items()}))
        for env, result in zip(self.env, found, strict=True):
            env[name] = result
        needs = self.grad and isinstance(found[0], torch.Tensor) and found[0].requires_grad
        self.nodes.append(replace(node, output=_spec(name, found, needs)))
        return name

    def part(self, name: str, number: int) -> str:
        return self.add("py.getitem", Ref(name), number)

    def grow(self) -> None:
        """One more operator, or a few that belong together."""
        self.grad = self.random.random() > 0.12
        kind = self.random.choice(_KINDS)
        before = len(self.nodes)
        # torch refuses an operator that does not fit, and the graph gets one operator fewer.
        with suppress(IndexError, RuntimeError, TypeError, ValueError):
            kind(self)
        if self.nodes[before:] and self.random.random() < 0.08:
            with suppress(RuntimeError):
                self.add("aten.detach.default", Ref(self.nodes[-1].name))
        self.grad = True

    def finished(self) -> Drawn:
        terms = [self.term() for _ in range(self.random.randint(1, 3))]
        loss = terms[0]
        for term in terms[1:]:
            loss = self.add("aten.add.Tensor", Ref(loss), Ref(term))
        metrics = {}
        for number in range(self.random.randint(0, 2)):
            with suppress(IndexError, RuntimeError):
                metrics[f"m{number}"] = self.scalar()
        return Drawn(self.graph(loss, metrics), self.weights, self.batches)

    def term(self) -> str:
        """Part of the loss: computed from a value with a gradient, if there is any."""
        trained = self.values(lambda v: v.is_floating_point() and v.requires_grad)
        name = self.any_of(trained or self.floats())
        if self.value(name).shape == self.value("targets").shape and self.random.random() < 0.5:
            return self.add("aten.mse_loss.default", Ref(name), Ref("targets"))
        return self.add("aten.mean.default", Ref(self.add("aten.pow.Tensor_Scalar", Ref(name), 2)))

    def scalar(self) -> str:
        name = self.any_of(self.values(lambda v: v.is_floating_point()))
        return name if self.value(name).dim() == 0 else self.add("aten.sum.default", Ref(name))

    def graph(self, loss: str, metrics: dict[str, str]) -> PortableGraph:
        specs = {
            name: WeightSpec(name, f"{name}.weight" if kind == "frozen" else name, t.dtype, tuple(t.shape))
            for (name, kind), t in zip(self.kinds.items(), self.weights.values(), strict=True)
        }
        self.weights = {specs[name].key: tensor for name, tensor in self.weights.items()}
        nodes = _together(_live(self.nodes, {loss, *metrics.values()}))
        used = {name for node in nodes for name in node.references()} | set(metrics.values())
        found = PortableGraph(
            tuple(nodes),
            inputs=self.inputs,
            parameters=tuple(s for n, s in specs.items() if n in used and self.kinds[n] == "parameter"),
            constants=tuple(s for n, s in specs.items() if n in used and self.kinds[n] != "parameter"),
            loss=loss,
            metrics=metrics,
        )
        aliases = Aliases(found)
        written = {aliases.group(name) for node in nodes for name in written_names(node)}
        states = tuple(s for s in found.constants if aliases.group(s.name) in written)
        for env in self.env:
            torch.autograd.backward(env[loss])
        return replace(found, states=states, constants=tuple(s for s in found.constants if s not in states))


# The kinds of operators, each as a model would use it.


def _linear(d: _Drawing) -> None:
    name = d.any_of(d.floats())
    width = d.value(name).shape[-1]
    made = d.values(lambda v: v.dim() == 2 and v.shape == (WIDTH, width))
    weights = [n for n in made if n not in d.kinds and n not in ("inputs", "targets")]
    if weights and d.random.random() < 0.5:
        weight = d.any_of(weights)
    else:
        weight = d.weight((WIDTH, width), "frozen" if d.random.random() < 0.15 else "parameter")
    bias = Ref(d.weight((WIDTH,))) if d.random.random() < 0.5 else None
    d.add("aten.linear.default", Ref(name), Ref(weight), bias)


def _normed_weight(d: _Drawing) -> None:
    direction, length = d.weight((WIDTH, WIDTH)), d.weight((WIDTH, 1))
    weight = d.add("aten._weight_norm.default", Ref(direction), Ref(length), 0)
    d.add("aten.linear.default", Ref(d.any_of(d.floats())), Ref(weight))


def _changed_weight(d: _Drawing) -> None:
    """Weights from which others are computed, independently of the batch."""
    name = d.weight((WIDTH, WIDTH))
    op = d.random.choice(["aten.tanh.default", "aten.t.default", "aten.exp.default", "aten.square.default"])
    d.add(op, Ref(name))


def _prompt(d: _Drawing) -> None:
    prompt = d.weight((2, WIDTH))
    size = d.add("aten.sym_size.int", Ref("inputs"), 0)
    wide = d.add("aten.expand.default", Ref(prompt), (Ref(size), -1, -1))
    d.add("aten.cat.default", (Ref(wide), Ref(d.any_of(d.floats((3,))))), 1)


def _pointwise(d: _Drawing) -> None:
    op = d.random.choice(["tanh", "relu", "sigmoid", "exp", "abs", "neg", "square", "clone", "relu_", "tanh_", "neg_"])
    d.add(f"aten.{op}.default", Ref(_writable(d) if op.endswith("_") else d.any_of(d.floats())))


def _along(d: _Drawing) -> None:
    name = Ref(d.any_of(d.floats()))
    kind = d.random.randrange(4)
    if kind == 0:
        d.add("aten.softmax.int", name, -1)
    elif kind == 1:
        d.add("aten.cumsum.default", name, -1)
    elif kind == 2:
        width = d.value(name.name).shape[-1]
        d.add("aten.layer_norm.default", name, (width,), Ref(d.weight((width,))), Ref(d.weight((width,))))
    else:
        d.add("aten.einsum.default", "b...->b...", (name,))


def _convolve(d: _Drawing) -> None:
    name = d.any_of(d.floats((3,)))
    channels = d.value(name).shape[1]
    d.add("aten.conv1d.default", Ref(name), Ref(d.weight((channels, channels, 1))))


def _recur(d: _Drawing) -> None:
    """An LSTM over the steps, with three result tensors."""
    name = d.any_of(d.values(lambda v: v.is_floating_point() and v.dim() == 3 and v.shape[2] == WIDTH))
    size = Ref(d.add("aten.sym_size.int", Ref(name), 0))
    start = Ref(d.add("aten.new_zeros.default", Ref(name), (1, size, WIDTH)))
    weights = tuple(Ref(d.weight((4 * WIDTH, WIDTH))) for _ in range(2))
    yielded = d.add("aten.lstm.input", Ref(name), (start, start), weights, False, 1, 0.0, True, False, True)
    for number in range(3):
        d.part(yielded, number)


def _fill_in(d: _Drawing) -> None:
    """A tensor of zeros into which a value is written, completely or in part."""
    name = d.any_of(d.floats((2,)))
    width = d.value(name).shape[1]
    size = d.add("aten.sym_size.int", Ref(d.random.choice(["inputs", name])), 0)
    zeros = d.add("aten.new_zeros.default", Ref(name), (Ref(size), width + d.random.randrange(2)))
    d.add("aten.copy_.default", Ref(d.add("aten.slice.Tensor", Ref(zeros), 1, 0, width)), Ref(name))
    d.add("aten.mul.Scalar", Ref(zeros), 2.0)


def _two(d: _Drawing) -> None:
    name = d.any_of(d.floats())
    similar = d.values(lambda v: v.is_floating_point() and v.shape == d.value(name).shape)
    d.add(d.random.choice(["aten.add.Tensor", "aten.mul.Tensor", "aten.sub.Tensor"]), Ref(name), Ref(d.any_of(similar)))


def _two_in_place(d: _Drawing) -> None:
    name = _writable(d)
    similar = d.values(lambda v: v.is_floating_point() and v.shape == d.value(name).shape)
    d.add(
        d.random.choice(["aten.add_.Tensor", "aten.mul_.Tensor", "aten.copy_.default"]),
        Ref(name),
        Ref(d.any_of(similar)),
    )


def _with_parameter(d: _Drawing) -> None:
    name = d.any_of(d.floats())
    weight = d.weight((d.value(name).shape[-1],), d.random.choice(["parameter", "parameter", "frozen", "buffer"]))
    d.add(d.random.choice(["aten.add.Tensor", "aten.mul.Tensor"]), Ref(name), Ref(weight))


def _penalty(d: _Drawing) -> None:
    """A number computed from a weight alone, which scales a value of the batch."""
    weight = d.any_of(list(d.kinds))
    square = d.add("aten.mean.default", Ref(d.add("aten.square.default", Ref(weight))))
    d.add("aten.mul.Tensor", Ref(d.any_of(d.floats())), Ref(square))


def _view(d: _Drawing) -> None:
    name = d.any_of(d.floats())
    value = d.value(name)
    kind = d.random.randrange(8)
    if kind == 0:
        d.add("aten.transpose.int", Ref(name), -1, -2 if value.dim() == 3 else -1)
    elif kind == 1:
        d.add("aten.slice.Tensor", Ref(name), -1, 1, value.shape[-1])
    elif kind == 2:
        size = d.add("aten.sym_size.int", Ref(d.any_of(d.floats())), 0)
        d.add("aten.view.default", Ref(name), (Ref(size), -1))
    elif kind == 3:
        d.add(
            "aten.expand.default",
            Ref(d.add("aten.unsqueeze.default", Ref(name), 1)),
            (-1, 2, *(-1,) * (value.dim() - 1)),
        )
    elif kind == 4:
        d.add("aten.select.int", Ref(name), 1, 0)
    elif kind == 5:
        d.add("aten.contiguous.default", Ref(name))
    elif kind == 6:
        d.add("aten.reshape.default", Ref(name), (-1, 2))
    else:
        d.add("aten.flatten.using_ints", Ref(name), 1)


def _write_into_view(d: _Drawing) -> None:
    name = _writable(d)
    piece = d.add("aten.select.int", Ref(name), -1, 0)
    if d.random.random() < 0.5:
        d.add("aten.mul_.Scalar", Ref(piece), 2.0)
    else:
        d.add("aten.add_.Tensor", Ref(piece), Ref(d.any_of(d.values(lambda v: v.shape == d.value(piece).shape))))


def _pieces(d: _Drawing) -> None:
    name = d.any_of(d.floats())
    kind = d.random.randrange(7)
    if kind == 0:
        pieces = d.add("aten.chunk.default", Ref(name), 2, -1)
    elif kind == 1:
        pieces = d.add("aten.split.Tensor", Ref(name), 2, 1)
    elif kind == 2:
        pieces = d.add("aten.topk.default", Ref(name), 2)
    elif kind == 3:
        pieces = d.add("aten.max.dim", Ref(name), -1)
    elif kind == 4:
        pieces = d.add("aten.sort.default", Ref(name))
    elif kind == 5:
        pieces = d.add("aten.unbind.int", Ref(name), 1)
    else:
        pieces = d.add("aten.std_mean.correction", Ref(name), (-1,), keepdim=True)
    for number in range(len(d.value(pieces))):
        d.part(pieces, number)


def _join(d: _Drawing) -> None:
    first = d.any_of(d.floats())
    similar = d.floats((d.value(first).dim(),))
    d.add("aten.cat.default", (Ref(first), Ref(d.any_of(similar))), d.random.choice([1, -1]))


def _drop(d: _Drawing) -> None:
    d.add("aten.dropout.default", Ref(d.any_of(d.floats())), 0.4, True)


def _batch_norm(d: _Drawing) -> None:
    name = d.any_of(d.floats((2,)))
    width = d.value(name).shape[-1]
    scale = Ref(d.weight((width,))) if d.random.random() < 0.6 else None
    mean, variance = d.weight((width,), "buffer"), d.weight((width,), "buffer")
    if mean == variance:
        raise IndexError("a norm needs two buffers")
    for env in (*d.env, d.weights):
        with torch.no_grad():
            env[variance].abs_()
    if d.random.random() < 0.5:
        d.add("aten.add_.Tensor", Ref(d.number_buffer()), 1)
    d.add("aten.batch_norm.default", Ref(name), scale, None, Ref(mean), Ref(variance), True, 0.1, 1e-5, False)


def _running_mean(d: _Drawing) -> None:
    """A buffer that is updated from the batch and then used in its updated form."""
    name = d.any_of(d.floats((2,)))
    buffer = d.weight((d.value(name).shape[-1],), "buffer")
    d.grad = False
    mean = d.add("aten.mean.dim", Ref(d.add("aten.detach.default", Ref(name))), (0,))
    d.add("aten.add_.Tensor", Ref(d.add("aten.mul_.Tensor", Ref(buffer), 0.9)), Ref(mean), alpha=0.1)
    d.grad = True
    d.add(d.random.choice(["aten.sub.Tensor", "aten.mul.Tensor"]), Ref(name), Ref(buffer))


def _embed(d: _Drawing) -> None:
    indices = d.any_of(d.values(lambda v: v.dtype == torch.int64 and v.dim() > 0))
    d.add("aten.embedding.default", Ref(d.weight((ROWS, WIDTH))), Ref(indices))


def _mask(d: _Drawing) -> None:
    name = d.any_of(d.floats())
    mask = d.add("aten.gt.Scalar", Ref(d.any_of(d.values(lambda v: v.shape == d.value(name).shape))), 0.1)
    if d.random.random() < 0.5:
        d.add("aten.masked_fill.Scalar", Ref(name), Ref(mask), 0.5)
    else:
        other = d.any_of(d.values(lambda v: v.is_floating_point() and v.shape == d.value(name).shape))
        d.add("aten.where.self", Ref(mask), Ref(name), Ref(other))


def _use_mask(d: _Drawing) -> None:
    mask = d.any_of(d.values(lambda v: v.dtype == torch.bool))
    similar = d.values(lambda v: v.is_floating_point() and v.shape == d.value(mask).shape)
    d.add("aten.masked_fill.Scalar", Ref(d.any_of(similar)), Ref(mask), 0.25)


def _number(d: _Drawing) -> None:
    """A division by a plain number that is read from a value's size."""
    size = d.add("aten.sym_size.int", Ref(d.any_of(d.floats())), d.random.choice([0, 1]))
    number = d.add(d.random.choice(["py.mul", "py.add"]), Ref(size), 2)
    if d.random.random() < 0.3:
        number = d.add("py.truediv", Ref(number), 3)
    d.add("aten.div.Tensor", Ref(d.any_of(d.floats())), Ref(number))


def _detached(d: _Drawing) -> None:
    d.add("aten.detach.default", Ref(d.any_of(d.floats())))


def _attend(d: _Drawing) -> None:
    name = Ref(d.any_of(d.floats((3,))))
    d.add("aten.scaled_dot_product_attention.default", name, name, Ref(d.any_of(d.floats((3,)))))


def _complex(d: _Drawing) -> None:
    name = d.any_of(d.floats())
    turned = d.add("aten.polar.default", Ref(d.add("aten.abs.default", Ref(name))), Ref(name))
    d.add("aten.abs.default", Ref(turned))


_KINDS: Final = (
    *(_linear, _linear, _linear, _normed_weight, _changed_weight, _prompt, _pointwise, _pointwise, _two, _two),
    *(_two_in_place, _with_parameter, _penalty, _view, _view, _view, _write_into_view, _pieces, _pieces, _join, _drop),
    *(_batch_norm, _running_mean, _embed, _mask, _use_mask, _number, _detached, _attend, _complex),
    *(_along, _along, _convolve, _recur, _fill_in),
)


def _writable(d: _Drawing) -> str:
    """A value that may be changed in place: not a weight, not the batch itself, and not a view of either."""
    kept = {d.value(name).untyped_storage().data_ptr() for name in (*d.kinds, *d.batches[0])}
    names = [n for n in d.floats() if d.value(n).untyped_storage().data_ptr() not in kept]
    if not names:
        return d.add("aten.clone.default", Ref(d.any_of(d.floats())))
    return d.any_of(names)


def _batch(size: int, generator: torch.Generator) -> Batch:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=_DTYPE)

    return {
        "inputs": normal(size, WIDTH),
        "steps": normal(size, LENGTH, WIDTH),
        "tokens": torch.randint(0, ROWS, (size, LENGTH), generator=generator),
        "unused": normal(size, 2),
        "targets": normal(size, WIDTH),
    }


def _pairs(first: Batch, second: Batch) -> Iterator[tuple[str, list[torch.Tensor]]]:
    for name in first:
        yield name, [first[name], second[name]]


def _spec(name: str, found: list[Any], needs_grad: bool) -> ValueSpec:
    first, second = found
    if isinstance(first, tuple | list):
        return None  # type: ignore[return-value]
    if not isinstance(first, torch.Tensor):
        return ValueSpec(name, None)
    if first.dim() != second.dim():
        raise ValueError("the number of dimensions depends on the size of the batch")
    shape = tuple(a if a == b else f"{a} or {b}" for a, b in zip(first.shape, second.shape, strict=True))
    return ValueSpec(name, first.dtype, shape, needs_grad)


def _filled(argument: Argument, env: Mapping[str, Any]) -> Any:
    if isinstance(argument, Ref):
        return env[argument.name]
    return [_filled(a, env) for a in argument] if isinstance(argument, tuple) else argument


def _live(nodes: list[Node], wanted: set[str]) -> list[Node]:
    kept = []
    for node in reversed(nodes):
        if node.name in wanted or ops.written_arguments(node.op):
            kept.append(node)
            wanted = wanted | set(node.references())
    kept.reverse()
    draws = [n.name for n in kept if n.seed is not None]
    return [replace(n, seed=draws.index(n.name)) if n.seed is not None else n for n in kept]


def _together(nodes: list[Node]) -> list[Node]:
    """The nodes with each `getitem` directly after the operator whose result it picks, as in a capture."""
    picks: dict[str, list[Node]] = {}
    for node in nodes:
        if node.op == "py.getitem":
            picks.setdefault(next(node.references()), []).append(node)
    return [each for node in nodes if node.op != "py.getitem" for each in (node, *picks.get(node.name, ()))]

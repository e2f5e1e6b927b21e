"""The interpreter: what it draws, what it keeps, what it writes, and what it refuses."""

import copy
import itertools
import weakref
from typing import Any

import pytest
import torch

from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.errors import GraphError
from ravnest.graph import ops
from ravnest.graph.aliasing import Aliases
from ravnest.graph.operators.allowed import OVERLOADS
from ravnest.graph.portable import Node, PortableGraph, Ref, ValueSpec, WeightSpec
from ravnest.graph.program import Program, draw_seed
from ravnest.spec import OptimizerSpec
from tests.graph.cutting import ALL, example, kept_generator, run


def test_the_seed_of_a_draw_is_fixed_for_ever() -> None:
    """Resumed runs and other machines must draw the same numbers: these values may never change."""
    assert [draw_seed(0, 0, 0), draw_seed(0, 1, 0), draw_seed(3, 5, 7)] == [
        6262535349803285907,
        482831970518665248,
        3262407604147448103,
    ]


def test_every_draw_has_a_seed_of_its_own() -> None:
    seeds = {draw_seed(s, m, n) for s in range(10) for m in range(100) for n in range(20)}
    assert len(seeds) == 10 * 100 * 20
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert 0 <= draw_seed(2**63 - 1, 2**40, 2**20) < 2**63


def test_dropout_draws_the_same_for_the_same_microbatch_and_other_numbers_for_another() -> None:
    found, batch = example("cnn").captured, example("cnn").made.batches[0]
    first, again, other = (run(found, [], batch, microbatch=m).loss for m in (4, 4, 5))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", ["cnn", "gpt_tied", "in_place", "NormedWeights", "Drops"])
def test_evaluation_neither_draws_nor_changes_the_state(name: str) -> None:
    found = example(name).captured
    weights = {w.name: found.weights[w.key].clone() for w in found.graph.weights}
    before = copy.deepcopy(weights)
    random_state = torch.get_rng_state()
    with torch.no_grad():
        Program(found.graph).run(found.sample, weights, train=False)
    assert torch.equal(torch.get_rng_state(), random_state)
    for key, weight in weights.items():
        assert torch.equal(weight, before[key]), key


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("train", [True, False])
def test_every_value_that_shares_memory_with_another_is_known_to(name: str, train: bool) -> None:
    """A cut must not part a value from an operator that writes into it, so no sharing may go unnoticed."""
    found = example(name).captured
    program = Program(found.graph)
    aliases = Aliases(found.graph)
    weights = {w.name: found.weights[w.key].clone() for w in found.graph.weights}
    env = program.environment({n: t.clone() for n, t in found.sample.items()}, weights)
    owners: dict[int, str] = {}
    kept = []
    for name_, value in [(n, env[program.slot(n)]) for n in found.graph.given_names()]:
        owners.update(dict.fromkeys(_memory(value), name_))
    steps = program.train_steps if train else program.evaluation_steps
    with kept_generator(), torch.no_grad():
        for step in steps:
            step.call(env)
            value = env[program.slot(step.node.name)]
            kept.append(value)  # memory that is freed and used again would look shared
            for memory in _memory(value):
                owner = owners.setdefault(memory, step.node.name)
                assert aliases.group(owner) == aliases.group(step.node.name), f"{step.node} shares memory with {owner}"


def test_no_operator_of_the_allow_list_shares_memory_unnoticed() -> None:
    """Calls every operator that plain arguments can call, and looks at whose memory the result has."""
    called = set()
    for op, sizes in itertools.product(_operators(), ([1], [4, 4], [0, 1])):
        arguments = _plain_arguments(op, sizes)
        if arguments is None:
            continue
        try:
            result = ops.resolve(op)(*arguments)
        except (RuntimeError, IndexError, NotImplementedError, ValueError):
            continue
        called.add(op)
        shared = set(_memory(arguments)) & set(_memory(result))
        known = {m for position in ops.aliased_arguments(op) for m in _memory(arguments[position])}
        assert shared <= known, f"{op} hands back memory it was given"
    assert len(called) > 400


def test_a_value_is_dropped_after_its_last_use() -> None:
    nodes, before = [], "inputs"
    for i in range(20):
        nodes.append(Node(f"n{i}", "aten.add.Tensor", (Ref(before), 1.0)))
        before = f"n{i}"
    graph = PortableGraph(tuple(nodes), inputs=(ValueSpec("inputs", torch.float32, (4,)),), loss=before)
    program = Program(graph)
    env = program.environment({"inputs": torch.zeros(4)}, {})
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    for step in program.train_steps:
        step.call(env)
        alive.add(env[program.slot(step.node.name)])
        for slot in step.frees:
            env[slot] = None
        most = max(most, len(alive))
    assert most <= 2


def test_a_missing_value_is_refused_by_name() -> None:
    graph = PortableGraph((), inputs=(ValueSpec("inputs", torch.float32, (4,)),))
    with pytest.raises(GraphError, match="needs the value 'inputs'"):
        Program(graph).run({}, {}, train=True)


@pytest.mark.parametrize(
    "op", ["aten.dropout.default", "aten.lstm.input", "aten.batch_norm.default", "aten.add_.Tensor"]
)
def test_an_operator_without_its_arguments_does_not_break_the_reading_of_the_graph(op: str) -> None:
    Program(PortableGraph((Node("x", op),), loss="x"))


def test_what_is_only_a_metric_is_not_trained_on() -> None:
    found = example("ParameterAsMetric").captured
    graph = found.graph
    scale = next(p.name for p in graph.parameters if p.key == "scale")
    assert graph.metrics == {"scale": scale}
    weights = {w.name: found.weights[w.key] for w in graph.weights}
    assert set(Program(graph).run(found.sample, weights, train=True)) == {graph.loss}
    assert set(Program(graph).run(found.sample, weights, train=False)) == {graph.loss, scale}


@pytest.mark.parametrize("clip", [{"clip_norm": 0.5}, {"clip_value": 0.01}, {}])
def test_gradients_that_share_memory_are_clipped_and_applied_one_by_one(clip: dict[str, float]) -> None:
    made, found = example("SameGradientTwice").made, example("SameGradientTwice").captured
    optimizer = OptimizerSpec("SGD", {"lr": 0.1, "momentum": 0.9})
    stage = Stage(
        found.graph,
        {key: tensor.clone() for key, tensor in found.weights.items()},
        StageSettings(optimizer=optimizer.to_json(), **clip),  # type: ignore[arg-type]
    )
    model = copy.deepcopy(made.model).train()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, (inputs, targets) in enumerate(made.batches):
        stage.forward(number, found.structure.flatten((inputs, targets)))
        stage.backward(number, None)
        stage.update(number)
        plain.zero_grad()
        made.loss(model(inputs), targets).backward()
        if "clip_norm" in clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip["clip_norm"])
        if "clip_value" in clip:
            torch.nn.utils.clip_grad_value_(model.parameters(), clip["clip_value"])
        plain.step()
    state, _ = stage.state()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state[f"param:{name}"], parameter.detach(), rtol=1e-6, atol=1e-7, msg=name)


def test_a_state_that_a_stage_changes_is_written_in_place() -> None:
    graph = PortableGraph(
        (Node("x", "aten.add_.Tensor", (Ref("count"), 1)),),
        states=(WeightSpec("count", "count", torch.int64, ()),),
        loss="x",
    )
    count = torch.zeros((), dtype=torch.int64)
    program = Program(graph)
    program.run({}, {"count": count}, train=True)
    assert int(count) == 1
    assert int(program.run({}, {"count": count}, train=False)["x"]) == 1
    assert int(count) == 1


def _operators() -> list[str]:
    return sorted(OVERLOADS)


def _plain_arguments(op: str, sizes: list[int]) -> list[Any] | None:
    """Small tensors and numbers for whatever the operator must be given; None where that is something else."""
    arguments: list[Any] = []
    for argument in ops.resolve(op)._schema.arguments:  # type: ignore[attr-defined]
        if argument.has_default_value() or argument.kwarg_only:
            break
        kind = str(argument.type)
        if kind == "Tensor":
            arguments.append(torch.rand(4, 4))
        elif kind == "List[Tensor]":
            arguments.append([torch.rand(4, 4), torch.rand(4, 4)])
        elif kind == "List[int]":
            arguments.append(sizes)
        elif kind in ("int", "number", "float"):
            arguments.append(0 if argument.name.startswith("dim") else 1)
        elif kind == "bool":
            arguments.append(False)
        elif kind == "str":
            arguments.append("ij->ji")
        elif kind.startswith("Optional"):
            arguments.append(None)
        else:
            return None
    if op == "aten.einsum.default":
        arguments[1] = arguments[1][:1]
    return arguments


def _memory(value: Any) -> list[int]:
    if isinstance(value, torch.Tensor):
        return [value.untyped_storage().data_ptr()] if value.numel() else []
    return [m for v in value for m in _memory(v)] if isinstance(value, tuple | list) else []

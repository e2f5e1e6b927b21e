"""The portable graph as data: it comes back as it went, and whatever is off about it is refused with one error."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ravnest.errors import GraphError
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.graph.portable import Device, Node, PortableGraph, Ref, ValueSpec, WeightSpec
from ravnest.graph.portable_reader import read_graph
from ravnest.graph.program import Program
from tests.graph.cutting import ALL, example

WEIGHT = WeightSpec("w", "layer.weight", torch.float32, (4, 4))
SMALL = PortableGraph(
    nodes=(
        Node("h", "aten.linear.default", (Ref("inputs"), Ref("w"))),
        Node("d", "aten.dropout.default", (Ref("h"), 0.5, True), seed=0),
        Node("r", "aten.native_layer_norm.default", (Ref("d"), (4,), None, None, 1e-5)),
        Node("y", "py.getitem", (Ref("r"), 0)),
        Node("z", "aten.zeros.default", ((Ref("n"), 4),), {"dtype": torch.float32, "device": Device()}, grad=False),
        Node("loss", "aten.mse_loss.default", (Ref("y"), Ref("z"))),
    ),
    inputs=(ValueSpec("inputs", torch.float32, ("s0", 4)), ValueSpec("n", None)),
    parameters=(WEIGHT,),
    loss="loss",
    metrics={"same": "loss"},
)


@pytest.mark.parametrize("name", ALL)
def test_graphs_and_their_stages_come_back_from_json_as_they_went(name: str) -> None:
    graph = example(name).graph
    for part in (graph, *split(graph, layout(graph).cuts[::5])):
        again = read_graph(part.to_json())
        # The spec of a node's result is known to the requester only, and is not sent.
        assert again == replace(part, nodes=tuple(replace(n, output=None) for n in part.nodes))
        assert again.to_json() == part.to_json()


def test_every_kind_of_argument_comes_back() -> None:
    infinite, x = (float("inf"), float("-inf")), Ref("inputs")
    nodes = (
        Node("a", "aten.add.Tensor", (x, 3), {"alpha": 2}),
        Node("b", "aten.mul.Tensor", (x, -(2**63))),
        Node("c", "aten.mul.Tensor", (x, 2**63 - 1)),
        Node("d", "aten.clamp.default", (x, *infinite)),
        Node("e", "aten.gelu.default", (x,), {"approximate": "tanh"}),
        Node("f", "aten.index.Tensor", (x, (None, Ref("i")))),
        Node("g", "aten.dropout.default", (x, 0.5, True)),
        Node("h", "aten.zeros.default", ((1, Ref("n")),), {"dtype": torch.bfloat16, "device": Device()}),
        Node("j", "aten.ones.default", ((2,),), {"layout": torch.strided, "pin_memory": False}),
        Node("k", "aten.clone.default", (x,), {"memory_format": torch.channels_last}),
        Node("loss", "aten.cat.default", ((x, x), -1)),
    )
    inputs = (*SMALL.inputs, ValueSpec("i", torch.int64, ("s0",)))
    graph = replace(SMALL, nodes=nodes, inputs=inputs)
    assert read_graph(graph.to_json()) == graph


def test_the_text_is_plain_json() -> None:
    nan = replace(SMALL, nodes=(*SMALL.nodes[:-1], Node("loss", "aten.add.Tensor", (Ref("y"), float("nan")))))
    assert json.loads(nan.to_json(), parse_constant=_refuse)["nodes"][-1]["args"][1] == {"float": "nan"}


def test_an_operator_off_the_list_is_refused() -> None:
    for op in (
        *("aten.from_file.default", "aten.as_strided.default", "aten.set_.source_Tensor", "aten.empty.memory_format"),
        *("aten.resize_.default", "prims.add.default", "os.system", "py.eval", "py.getattr", "__import__"),
        *(
            "aten.linear",
            "aten.linear.nonsense",
            "aten.linear.default.x",
            "aten.__class__.default",
            "",
            "aten..default",
        ),
    ):
        with pytest.raises(GraphError):
            _altered(lambda data, op=op: data["nodes"][0].update(op=op))


@pytest.mark.parametrize(
    ("alter", "reason"),
    [
        (lambda d: d["nodes"][0]["args"].append({"ref": "nowhere"}), "uses 'nowhere' before it exists"),
        (lambda d: d["nodes"].reverse(), "before it exists"),
        (lambda d: d["nodes"][1].update(name="h"), "defines 'h' twice"),
        (lambda d: d["nodes"][1].update(name="w"), "defines 'w' twice"),
        (lambda d: d["inputs"].append(d["inputs"][0]), "defines 'inputs' twice"),
        (lambda d: d.update(loss="gone"), "should yield 'gone'"),
        (lambda d: d["metrics"].update(other="gone"), "should yield 'gone'"),
        (lambda d: d["sends"].append({**d["inputs"][0], "name": "gone"}), "should yield 'gone'"),
        (lambda d: d["nodes"][0]["args"].append([[[[[[[[[[1]]]]]]]]]]), "nested more than 8 deep"),
        (lambda d: d["nodes"][0]["args"].append(2**63), "more than 64 bits"),
        (lambda d: d["nodes"][0]["args"].append(-(10**400)), "more than 64 bits"),
        (lambda d: d["nodes"][0]["args"].append("x" * 257), "more than 256 characters"),
        (lambda d: d["nodes"][0]["args"].append({"call": "f"}), "unknown form"),
        (lambda d: d["nodes"][0]["args"].append({"memory_format": ["channels_last"]}), "unknown form"),
        (lambda d: d["nodes"][0]["args"].append({"device": "cuda:0"}), "unknown form"),
        (lambda d: d["nodes"][0]["args"].append({"dtype": "object"}), "not a tensor type"),
        (lambda d: d["nodes"][0]["args"].append({"dtype": ["float32"]}), "not a tensor type"),
        (
            lambda d: d["nodes"][0].update(op="aten.ones.default", args=[[2]], kwargs={"device": "meta"}),
            "names a device; the stage chooses it",
        ),
        (
            lambda d: d["nodes"][0].update(
                op="aten.to.device", args=[{"ref": "inputs"}, "cuda:7", {"dtype": "float32"}]
            ),
            "names a device; the stage chooses it",
        ),
        (lambda d: d["nodes"][0].update(name="a b"), "not a valid name"),
        (lambda d: d["nodes"][0].update(name="__import__('os')"), "not a valid name"),
        (lambda d: d["nodes"][0].update(seed=-1), "not a valid size"),
        (lambda d: d["nodes"][0].update(seed=10**30), "not a valid size"),
        (lambda d: d["parameters"][0].update(key="../../etc/passwd"), "not a valid name for a weight"),
        (lambda d: d["parameters"][0].update(key="a..b"), "not a valid name for a weight"),
        (lambda d: d["parameters"][0].update(key="/etc/passwd"), "not a valid name for a weight"),
        (lambda d: d["parameters"][0].update(key=["a"]), "not a valid name for a weight"),
        (lambda d: d["parameters"][0].update(shape=[-1, 4]), "not a valid size"),
        (lambda d: d["parameters"][0].update(shape=[2**40]), "not a valid size"),
        (lambda d: d["parameters"][0].update(shape=[True]), "not a valid size"),
        (lambda d: d["parameters"][0].update(shape=["s0"]), "not a valid size"),
        (lambda d: d["inputs"][0].update(shape=["s0; drop"]), "not a valid size"),
        (lambda d: d["inputs"][0].update(shape=[1] * 65), "no valid shape"),
        (lambda d: d.update(nodes={}), "no valid nodes"),
        (lambda d: d.update(metrics=[]), "no valid metrics"),
        (lambda d: d.pop("inputs"), "no valid inputs"),
        (lambda d: d.update(version=1), "format version 1"),
        (lambda d: d.update(format="other"), "not a portable graph"),
    ],
)
def test_a_malformed_graph_is_refused_with_the_reason(alter: Any, reason: str) -> None:
    with pytest.raises(GraphError, match=reason):
        _altered(alter)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "1", '"x"', b"\xff\xfe\x00", "[" * 100_000, '{"format":' * 5_000, "9" * 5_000, "NaN"],
)
def test_a_text_that_is_no_graph_is_refused(text: str | bytes) -> None:
    with pytest.raises(GraphError):
        read_graph(text)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=20,
)
_FIELDS = list(json.loads(SMALL.to_json()))


@given(st.binary(max_size=200) | st.text(max_size=200) | _JSON.map(json.dumps))
@settings(max_examples=200)
def test_any_text_gives_a_graph_or_a_graph_error(text: str | bytes) -> None:
    _read(text)


@given(st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=4))
@settings(max_examples=200)
def test_any_field_may_hold_anything_and_gives_a_graph_or_a_graph_error(fields: dict[str, Any]) -> None:
    _read(json.dumps({**json.loads(SMALL.to_json()), **fields}))


@given(st.randoms(use_true_random=False), _JSON)
@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
def test_a_graph_with_anything_in_any_place_gives_a_graph_or_a_graph_error(chooser: random.Random, junk: Any) -> None:
    data = json.loads(SMALL.to_json())
    place: Any = data
    while True:
        key = chooser.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or chooser.random() < 0.2:
            break
        place = inner
    if chooser.random() < 0.3:
        del place[key]
    else:
        place[key] = junk
    _read(json.dumps(data))


def _read(text: str | bytes) -> None:
    """Whatever is read without an error must also be ready to run, or be refused with the same error."""
    try:
        graph = read_graph(text)
        Program(graph)
    except GraphError:
        return
    assert read_graph(graph.to_json()).to_json() == graph.to_json()


def _altered(alter: Any) -> PortableGraph:
    data = json.loads(SMALL.to_json())
    alter(data)
    return read_graph(json.dumps(data))


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")

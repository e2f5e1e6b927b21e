"""However a graph is cut, it computes what it does in one piece, and no cut hangs. `make cuts` tries many more."""

from random import Random

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ravnest.coordinator.feed.cluster_state import ClusterRun
from ravnest.graph.capture.capture import capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.graph.portable import Node, PortableGraph, Ref, ValueSpec, WeightSpec
from tests.cuts import pipeline
from tests.cuts.checking import check_every_cut
from tests.cuts.drawing import NotAModelError, drawn
from tests.cuts.pipeline import HangError, outcome
from tests.exactness.rootless_models import MODELS
from tests.graph.cutting import kept_generator


@settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False), st.integers(2, 6))
def test_every_cut_of_a_random_graph_computes_what_the_whole_graph_does(random: Random, operators: int) -> None:
    try:
        found = drawn(random, operators)
    except NotAModelError:
        assume(False)
    # All ways to cut it are at most 63 then.
    assume(len(layout(found.graph).cuts) <= 7)
    with kept_generator():
        check_every_cut(found.graph, found.weights, found.batches)


@pytest.mark.parametrize("name", MODELS)
def test_every_cut_of_a_model_that_begins_with_its_weights_computes_what_the_model_does(name: str) -> None:
    made = MODELS[name][0].make(batches=5)
    batches = [tuple(t.double() if t.is_floating_point() else t for t in batch) for batch in made.batches[3:]]
    found = capture(made.model.double(), made.loss, {"score": made.loss}, batches)
    with kept_generator():
        check_every_cut(found.graph, found.weights, [found.structure.flatten(batch) for batch in batches])


def test_a_stage_may_have_nothing_to_train_and_let_no_gradient_through() -> None:
    graph, weights, batch = _late_learner()
    plan = layout(graph)
    root, stem, leaf = split(graph, [1, 2])
    assert not root.parameters and not stem.parameters and leaf.parameters
    assert not any(value.needs_grad for cut in (1, 2) for value in plan.crossing[cut])
    with kept_generator():
        check_every_cut(graph, weights, [batch, batch], every_mode=True)


def test_a_microbatch_that_is_never_completed_is_a_failure_and_no_wait_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "PATIENCE_SECONDS", 0.2)
    graph, weights, batch = _late_learner()
    assert outcome(graph, weights, [batch], [1]).losses
    monkeypatch.setattr(ClusterRun, "inputs_of", property(lambda cluster: []))
    with pytest.raises(HangError, match="a microbatch has not been done"):
        outcome(graph, weights, [batch], [1])


def _late_learner() -> tuple[PortableGraph, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Two frozen layers, and one that is trained."""

    def linear(name: str, source: str, weight: str, needs_grad: bool) -> Node:
        return Node(
            name,
            "aten.linear.default",
            (Ref(source), Ref(weight)),
            output=ValueSpec(name, torch.float64, ("b", 2), needs_grad),
        )

    nodes = (
        linear("a", "inputs", "first", False),
        linear("b", "a", "second", False),
        linear("c", "b", "third", True),
        Node("loss", "aten.mean.default", (Ref("c"),), output=ValueSpec("loss", torch.float64, (), True)),
    )
    specs = [WeightSpec(name, f"{name}.weight", torch.float64, (2, 2)) for name in ("first", "second", "third")]
    graph = PortableGraph(
        nodes,
        inputs=(ValueSpec("inputs", torch.float64, ("b", 2)),),
        parameters=(specs[2],),
        constants=tuple(specs[:2]),
        loss="loss",
    )
    weights = {spec.key: torch.full((2, 2), 0.5, dtype=torch.float64) for spec in specs}
    return graph, weights, {"inputs": torch.ones(3, 2, dtype=torch.float64)}

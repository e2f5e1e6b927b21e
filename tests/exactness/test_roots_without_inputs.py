"""A root that computes on weights alone needs nothing of the batch, and is told of each microbatch all the same."""

import copy
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ravnest import Job, Pipeline
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.graph.capture.capture import capture
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.planner.count_costs import cut_before
from tests.exactness.plain_loop import train_plainly, worst_difference
from tests.exactness.rootless_models import MODELS

TOLERANCE = 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_a_root_that_needs_nothing_of_the_batch_trains_as_a_plain_loop_does(
    swarm: EmbeddedSwarm, tmp_path: Path, name: str
) -> None:
    kind, behind = MODELS[name]
    made = kind.make(batches=12)
    job = Job(
        model=made.model,
        loss=made.loss,
        train_data=made.batches,
        eval_data=made.batches[:2],
        optimizer=kind.optimizer,
        pipeline=Pipeline(in_flight=1, cuts=(behind,)),
    )
    graph = capture(made.model, made.loss, {}, made.batches[:2]).graph
    assert not split(graph, [cut_before(graph, layout(graph), behind)])[0].inputs, "the root is to have no input"
    result = swarm.train(job, providers=2, run=tmp_path / "run", display=False)
    assert result.summary.status == "finished"
    assert result.model is not None
    have = copy.deepcopy(made.model)
    have.load_state_dict(load_file(result.model))
    plain = train_plainly(kind, made)
    assert worst_difference(plain.state_dict(), made.model.state_dict())[0] > 1e-3, "nothing was learned"
    worst, where = worst_difference(have.state_dict(), plain.state_dict())
    assert worst <= TOLERANCE, f"{where} is off by {worst:.1e}"

"""Updates on a GPU: every way to keep older weights, moments in 8 bits, and a tied weight between two stages."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.job import Job
from ravnest.settings import Pipeline
from tests.exactness.plain_loop import train_plainly, worst_difference
from tests.models import ZOO, GPTBlock, Made

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and there is none here")

KIND = ZOO["gpt_tied"]
ADAM = partial(torch.optim.AdamW, lr=1e-3)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@pytest.fixture(scope="module", params=[("cuda:0",), ("cuda:0", "cpu")], ids=["one GPU", "GPU and CPU"])
def swarm(request: pytest.FixtureRequest) -> Iterator[EmbeddedSwarm]:
    with EmbeddedSwarm(3, devices=request.param) as opened:
        yield opened


def _made() -> Made:
    """Without dropout, because a GPU draws other numbers than a processor."""
    made = KIND.make()
    for module in made.model.modules():
        if isinstance(module, GPTBlock):
            module.dropout = module.drop.p = 0.0
    return made


def _job(pipeline: Pipeline, optimizer: Callable[..., torch.optim.Optimizer] = ADAM, times: int = 1) -> Job:
    made = _made()
    return Job(
        model=made.model, loss=made.loss, train_data=made.batches, optimizer=optimizer, pipeline=pipeline, epochs=times
    )


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_tied_weight_trains_on_a_gpu_as_in_a_plain_loop(swarm: EmbeddedSwarm, tmp_path: Path, stages: int) -> None:
    made = _made()
    job = _job(Pipeline(in_flight=1), SGD)
    result = swarm.train(job, providers=stages, run=tmp_path / "run", display=False)
    plain = train_plainly(KIND, made, optimizer=SGD)
    assert result.model is not None
    made.model.load_state_dict(load_file(result.model))
    worst, where = worst_difference(made.model.state_dict(), plain.state_dict())
    # Sums are taken in another order on a GPU.
    assert worst < 1e-3, f"{where} is off by {worst:.1e}"


@pytest.mark.parametrize("versions", ["stash", "stash_8bit", "in_place", "recompute", "latest"])
@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_every_way_to_keep_older_weights_learns_on_a_gpu(
    swarm: EmbeddedSwarm, tmp_path: Path, versions: str, moments: str
) -> None:
    losses = {}
    for name, chosen in {
        "plain": Pipeline(in_flight=1),
        "other": Pipeline(in_flight=4, versions=versions, moments=moments),
    }.items():
        result = swarm.train(_job(chosen, times=4), providers=2, run=tmp_path / name, display=False)
        summary = result.summary
        assert summary.ledger.completed == summary.ledger.fed > 0 and summary.ledger.applied_twice == 0
        assert summary.train_loss is not None
        losses[name] = summary.train_loss
    assert losses["other"] == pytest.approx(losses["plain"], abs=0.15), losses

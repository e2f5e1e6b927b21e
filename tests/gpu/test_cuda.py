"""Training on a GPU: the same swarm, the same result, several providers on one card, and CPU and GPU mixed."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.engine.speed.device_speed import measure_speed
from ravnest.job import Job
from ravnest.provider.machine.memory import forget_peak, peak_bytes
from ravnest.provider.machine.speed_cache import device_name
from ravnest.settings import Averaging, Pipeline

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and there is none here")


@pytest.fixture(scope="module", params=[("cuda:0",), ("cuda:0", "cpu")], ids=["one GPU", "GPU and CPU"])
def swarm(request: pytest.FixtureRequest) -> Iterator[EmbeddedSwarm]:
    with EmbeddedSwarm(3, devices=request.param) as opened:
        yield opened


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64),
        nn.GELU(),
        nn.BatchNorm1d(64),
        nn.Linear(64, 64),
        nn.GELU(),
        nn.Linear(64, 64),
        nn.Linear(64, 4),
    )


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(32, 16, generator=generator), torch.randint(0, 4, (32,), generator=generator)) for _ in range(20)
    ]


def test_stages_on_a_gpu_train_to_the_same_weights_as_a_plain_loop(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    plain = _model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for inputs, targets in _batches():
        optimizer.zero_grad()
        F.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
    job = Job(
        model=_model(),
        loss=F.cross_entropy,
        train_data=_batches(),
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        pipeline=Pipeline(in_flight=1),
    )
    result = swarm.train(job, run=tmp_path / "run", display=False)
    assert result.model is not None
    trained = load_file(result.model)
    for name, wanted in plain.state_dict().items():
        # Sums are taken in another order on a GPU: the bound is that of float32 over 20 updates, not of equality.
        torch.testing.assert_close(trained[name], wanted, rtol=1e-3, atol=1e-4)


def test_a_stage_on_a_gpu_reports_the_memory_of_the_gpu(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    job = Job(
        model=_model(),
        loss=F.cross_entropy,
        train_data=_batches(),
        eval_data=_batches()[:2],
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        epochs=2,
    )
    result = swarm.train(job, run=tmp_path / "run", display=False)
    stages = result.summary.clusters[0].stages
    on_gpu = [stage for stage in stages if stage.device.startswith("cuda")]
    assert on_gpu and all(0 < stage.peak_memory_bytes < 2**30 for stage in on_gpu)
    assert result.summary.ledger.completed == 40 and result.summary.eval["loss"] is not None


def test_clusters_on_a_gpu_average_what_they_learnt(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    job = Job(
        model=_model(),
        loss=F.cross_entropy,
        train_data=_batches(),
        eval_data=_batches()[:2],
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        averaging=Averaging(every=128, codec="int8", optimizer_state=True),
        epochs=3,
    )
    result = swarm.train(job, clusters=2, run=tmp_path / "run", display=False)
    summary = result.summary
    assert sorted(len(cluster.stages) for cluster in summary.clusters) == [1, 2]
    assert summary.averaging.rounds >= 2 and summary.averaging.skipped == 0
    assert summary.ledger.completed == 60
    plain = _model()
    assert result.model is not None
    plain.load_state_dict(load_file(result.model))
    plain.eval()
    with torch.no_grad():
        losses = [float(F.cross_entropy(plain(inputs), targets)) for inputs, targets in _batches()[:2]]
    assert summary.eval["loss"] == pytest.approx(sum(losses) / 2, rel=1e-3), "what was evaluated is what was exported"


def test_a_gpu_is_measured_with_a_block_that_fills_it() -> None:
    device = torch.device("cuda:0")
    speed = measure_speed(device, torch.cuda.mem_get_info(device)[0])
    # The small blocks are over before their kernels are started: with them every card would look alike.
    assert speed.flops_per_second > 1e12
    assert speed.memory_bytes_per_second > 1e11
    assert device_name(device)
    forget_peak(device)
    assert peak_bytes(device) < 1 << 30

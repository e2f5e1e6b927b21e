"""The codec of a link follows from the line under it, as it was measured between real machines."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path as FilePath

import pytest

from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.jobfile import load_job
from tests.wan import Host, Lab, Path
from tests.wan.internet import Internet, ended_well, stages
from tests.wan.needs import need_lab

pytestmark = pytest.mark.timeout(200)

PROVIDERS = ("p1", "p2", "p3")
ON_A_SLOW_LINE = "p3"

EXACT = """
from functools import partial

import torch
from torch import nn

import ravnest

WIDTH, BATCH = 512, 512

torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
features = torch.randn(6, BATCH, WIDTH, generator=generator)
job = ravnest.Job(
    model=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4)),
    loss=nn.functional.cross_entropy,
    train_data=[(x, x[:, :4].argmax(dim=1)) for x in features],
    optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    pipeline=ravnest.Pipeline(in_flight=1, cuts=("2", "4")),
)
"""
"""A job that sends a MiB between two stages in each direction, exactly, because one microbatch is in flight."""


@pytest.fixture
def internet(tmp_path: FilePath) -> Iterator[Internet]:
    need_lab()
    hosts = [Host(name) for name in ("home", *PROVIDERS) if name != ON_A_SLOW_LINE]
    slow = Host(ON_A_SLOW_LINE, up_mbps=20, down_mbps=20)
    with Lab([*hosts, slow], default=Path(delay_ms=5)) as lab, ExitStack() as stack:
        yield Internet(lab, PROVIDERS, tmp_path, stack)


def test_exact_values_are_packed_only_on_the_slow_line_and_stay_exact(
    internet: Internet, swarm: EmbeddedSwarm, tmp_path: FilePath
) -> None:
    serving, joined = internet.train(EXACT)
    said = ended_well(serving)
    for provider in joined:
        ended_well(provider)
    summary = internet.summary()
    assert summary["status"] == "finished", said
    links = [(stage["provider"], link) for stage in stages(summary) for link in stage["links"]]
    assert len(links) == 4
    for name, link in links:
        is_slow = ON_A_SLOW_LINE in (name, link["to"])
        assert link["codec"] == ("lossless" if is_slow else "float32"), (name, link)
        assert (link["bytes_sent"] < 0.9 * link["bytes_raw"]) == is_slow, (name, link)
    told = {event["codec"]: event["reason"] for event in internet.events("codec")}
    assert "lossless" in told, told

    alone = swarm.train(load_job(str(tmp_path / "job.py")), providers=3, run=tmp_path / "alone", display=False)
    assert summary["train_loss"] == pytest.approx(alone.summary.train_loss, rel=1e-6)

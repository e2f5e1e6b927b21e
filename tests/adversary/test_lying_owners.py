"""One of three clusters belongs to a liar: real processes and lines. It is named, and the others' model stays right."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ravnest import Averaging, Pipeline
from ravnest.averaging.deadlines import RoundLimits
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.coordinator.launch.session import TrainResult
from ravnest.coordinator.run.timeouts import DEFAULT_TIMEOUTS, Timeouts
from tests.adversary.lying_swarm import events
from tests.e2e.jobs import a_job, a_net
from tests.e2e.watching import PATIENCE_SECONDS, adds_up, endless, kinds, wait_for
from tests.swarms.embedded import impostor

LIAR = "provider-2"


class Liars:
    """Two honest providers and a liar, each a cluster of its own."""

    def __init__(self, late: Path) -> None:
        self.late = late
        """While this file is there, the liar is honest, and its control line is slow once."""
        program = Path(__file__).with_name("lying_provider.py")
        self.swarm = EmbeddedSwarm(3, start=impostor(LIAR, program, RAVNEST_LATE=str(late)))

    def learn(self, run: Path, data: Any, timeouts: Timeouts = DEFAULT_TIMEOUTS) -> TrainResult:
        # Slow enough that nothing learned honestly is far from the beginning.
        slow = partial(torch.optim.SGD, lr=0.01)
        averaging = Averaging(every=64)
        job = a_job(data, optimizer=slow, pipeline=Pipeline(), averaging=averaging)
        return self.swarm.train(job, clusters=3, run=run, display=False, timeouts=timeouts)


@pytest.fixture(scope="module")
def liars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Liars]:
    found = Liars(tmp_path_factory.mktemp("liar") / "late")
    with found.swarm:
        yield found


def test_a_liar_is_named_and_the_others_learn_as_if_it_were_not_there(liars: Liars, tmp_path: Path) -> None:
    run, ended = tmp_path / "run", threading.Event()

    def watch() -> None:
        try:
            wait_for(run, "left_out", 4)
            wait_for(run, "round", kinds(run).count("round") + 2)
        finally:
            ended.set()

    watching = threading.Thread(target=watch)
    watching.start()
    result = liars.learn(run, endless(ended))
    watching.join(PATIENCE_SECONDS)
    assert adds_up(result, result.summary.ledger.fed) and result.model is not None
    assert result.summary.clusters[0].stages[0].provider != LIAR, "else the model would be the liar's"
    told = events(run, "bounded", "clipped", "left_out", "dropped", "disagreed")
    assert {event["provider"] for event in told} == {LIAR}, told
    found = [(event["kind"], event["reason"]) for event in told]
    for kind, reason in (
        ("bounded", "but the ledger knows of"),
        ("left_out", "not finite"),
        ("left_out", "bytes"),
        ("left_out", "more than 100 times as much is left out"),
        ("left_out", "but by the norms that its contributors declared it is at most"),
    ):
        assert any(kind == what and reason in why for what, why in found), (kind, reason, found)
    # The others go on without it, and when it is honest again it is one of them.
    rounds = [event["clusters"] for event in events(run, "round")]
    assert 2 in rounds and rounds[-1] == 3
    # Nothing of what it made up, a thousand for every parameter, is in what they have.
    before, after = a_net().state_dict(), load_file(result.model)
    assert 0.0 < max(float((after[name] - before[name]).abs().max()) for name in before) < 10.0


def test_one_whose_line_is_slow_takes_the_mean_late_and_goes_on_with_the_others(liars: Liars, tmp_path: Path) -> None:
    soon = Timeouts(rounds=RoundLimits(min_reducing_seconds=0.4))
    run, ended = tmp_path / "run", threading.Event()

    def watch() -> None:
        try:
            wait_for(run, "late")
            wait_for(run, "round", 4)
        finally:
            ended.set()

    liars.late.touch()
    watching = threading.Thread(target=watch)
    watching.start()
    result = liars.learn(run, endless(ended), soon)
    watching.join(PATIENCE_SECONDS)
    assert adds_up(result, result.summary.ledger.fed)
    # On a busy machine an honest one may be, too.
    late = [event["reason"] for event in events(run, "late") if event["provider"] == LIAR]
    assert any("has not confirmed in time that it applied the mean of round 1" in reason for reason in late)
    # It claims nothing that has counted already, and in the end all are alike.
    assert events(run, "bounded", "dropped", "clipped") == []
    assert events(run, "round")[-1]["clusters"] == 3

"""A tied embedding belongs to the leaf, which looks its rows up for the root: over losses, replays and rounds."""

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ravnest import Pipeline
from ravnest.coordinator.replicas import pace as replica_pace
from ravnest.monitor.events import read_events
from ravnest.monitor.json_lines import read_lines
from ravnest.planner.recovery import state_periods
from tests.e2e.disturbing import RATE, Disturbed, Endless, disturbed
from tests.e2e.jobs import Batch
from tests.e2e.tied_jobs import TiedModel, a_tied_model, next_token_loss, token_batch
from tests.swarms.embedded import SharedSwarm

pytestmark = pytest.mark.timeout(300)

POOL = [token_batch(seed) for seed in range(50)]
HELD_OUT = token_batch(99)


class Tokens:
    """The same number of batches as the data of a disturbed run, of tokens."""

    def __init__(self, data: Endless) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Batch]:
        for _, batch in zip(self._data, itertools.cycle(POOL), strict=False):
            yield batch


def _plain(microbatches: int, accumulate: int = 1) -> TiedModel:
    model = a_tied_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for number, (tokens, targets) in enumerate(itertools.islice(itertools.cycle(POOL), microbatches), start=1):
        (next_token_loss(model(tokens), targets) / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def _loss_of(model: nn.Module) -> float:
    with torch.no_grad():
        return float(next_token_loss(model(HELD_OUT[0]), HELD_OUT[1]))


@pytest.fixture(scope="module")
def supply() -> Iterator[SharedSwarm]:
    found = SharedSwarm(5)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas are made often."""
    for module in (replica_pace, state_periods):
        monkeypatch.setattr(module, "MIN_REPLICA_SECONDS", 0.3)


_train = partial(disturbed, walked=Tokens, model=a_tied_model(), loss=next_token_loss, eval_data=[HELD_OUT])


@pytest.mark.parametrize("accumulate", [1, 3])
def test_standbys_take_the_leaf_and_the_root(supply: SharedSwarm, tmp_path: Path, accumulate: int) -> None:
    def lose(run: Disturbed) -> None:
        run.wait("deployed")
        for stage in (2, 0):
            run.wait("replica")
            run.kill(run.stages()[stage])
            run.wait("failover", stages=[stage])
        run.wait("replica")

    pipeline = Pipeline(in_flight=1, accumulate=accumulate, record_updates=True)
    result = _train(supply.with_providers(5), tmp_path / "run", lose, providers=3, pipeline=pipeline)
    assert result.summary.status == "finished" and result.summary.ledger.lost == 0
    # A replica of one stage is older than the other stages.
    expected = _loss_of(_plain(result.summary.ledger.fed, accumulate))
    assert result.summary.eval["loss"] == pytest.approx(expected, abs=0.05)


def test_stages_that_begin_again_together_have_the_whole_gradient_of_the_tied_weight(
    supply: SharedSwarm, tmp_path: Path
) -> None:
    def lose(run: Disturbed) -> None:
        run.wait("deployed")
        run.wait("replica")
        run.kill(run.stages()[2])
        run.wait("reformed")

    result = _train(supply.with_providers(3, exactly=True), tmp_path / "run", lose, providers=3)
    assert result.summary.status == "finished" and result.summary.ledger.lost == 0 and result.model is not None
    found = load_file(result.model)
    for name, value in _plain(result.summary.ledger.fed).state_dict().items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)


def test_with_several_in_flight_the_gradients_of_rows_are_applied_once_although_the_root_is_lost(
    supply: SharedSwarm, tmp_path: Path
) -> None:
    def lose(run: Disturbed) -> None:
        run.wait("deployed")
        run.wait("replica")
        run.kill(run.stages()[0])
        run.wait("failover", stages=[0])
        run.wait("replica")

    pipeline = Pipeline(in_flight=4, record_updates=True)
    result = _train(supply.with_providers(4), tmp_path / "run", lose, providers=3, pipeline=pipeline)
    fed = result.summary.ledger.fed
    assert result.summary.status == "finished" and result.summary.ledger.lost == 0
    assert not [event for event in read_events(result.run / "events.jsonl") if event["kind"] == "applied_twice"]
    leaf = [line for line in read_lines(result.run / "updates.jsonl") if line["stage"] == 2]
    assert {line["microbatch"] for line in leaf} == set(range(fed))
    rows = Counter(number for line in leaf for number in line.get("rows", ()))
    assert rows == dict.fromkeys(range(fed), 1)
    late = [line["microbatch"] - number for line in leaf for number in line.get("rows", ())]
    assert max(late) > 0, "with several in flight, some come back after the next update"
    assert result.summary.eval["loss"] == pytest.approx(_loss_of(_plain(fed)), abs=0.1)


def test_two_clusters_average_a_tied_weight(supply: SharedSwarm, tmp_path: Path) -> None:
    def wait(run: Disturbed) -> None:
        run.wait("deployed")
        for _ in range(2):
            run.wait("round")

    result = _train(supply.with_providers(4), tmp_path / "run", wait, providers=4, clusters=2)
    assert result.summary.status == "finished" and result.summary.ledger.lost == 0 and result.model is not None
    model = a_tied_model()
    before = _loss_of(model)
    model.load_state_dict(load_file(result.model))
    assert result.summary.eval["loss"] == pytest.approx(_loss_of(model), rel=1e-4)
    assert _loss_of(model) < before / 2

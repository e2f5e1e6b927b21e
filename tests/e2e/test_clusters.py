"""Several clusters train one model: each does what it can, they average, and the loss of one is not the end."""

import itertools
import json
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from ravnest import Averaging, Job, Pipeline
from ravnest.coordinator.embedded import EmbeddedSwarm
from ravnest.coordinator.session import TrainResult
from ravnest.monitor.events import read_events
from tests.e2e.jobs import CLASSES, FEATURES, Batch, a_job, accuracy, batches, every_updates, samples

PATIENCE_SECONDS = 60.0


def learn(swarm: EmbeddedSwarm, run: Path, clusters: int, job: Job, providers: int = 4) -> TrainResult:
    return swarm.train(job, providers=providers, clusters=clusters, run=run, display=False)


def kinds(run: Path) -> list[str]:
    return [event["kind"] for event in read_events(run / "events.jsonl")]


def adds_up(result: TrainResult, microbatches: int) -> bool:
    ledger = result.summary.ledger
    return (ledger.fed, ledger.completed, ledger.lost, ledger.applied_twice) == (microbatches, microbatches, 0, 0)


@pytest.mark.parametrize(
    "averaging",
    [
        Averaging(every=64),
        Averaging(every=64, codec="int8", outer="nesterov", fragments=2),
        Averaging(every=64, codec="int4", optimizer_state=True),
        Averaging(every=64, codec="bfloat16", blocking=True),
    ],
    ids=lambda averaging: f"{averaging.codec}-{averaging.outer}",
)
def test_clusters_with_different_cuts_learn_one_model(
    swarm: EmbeddedSwarm, tmp_path: Path, averaging: Averaging
) -> None:
    job = a_job(
        batches([8] * 60),
        eval_data=[samples(64, seed=7)],
        metrics={"accuracy": accuracy},
        pipeline=Pipeline(),
        averaging=averaging,
        epochs=2,
    )
    result = learn(swarm, tmp_path / "run", 2, job, providers=3)
    summary = result.summary
    assert adds_up(result, 120)
    assert sorted(len(cluster.stages) for cluster in summary.clusters) == [1, 2]
    assert all(cluster.samples > 0 for cluster in summary.clusters)
    assert sum(cluster.samples for cluster in summary.clusters) == summary.samples == 960
    assert summary.averaging.rounds >= 2 and summary.averaging.skipped == 0
    assert summary.averaging.rings == 2 or (averaging.fragments == 2 and summary.averaging.rings > 2)
    assert summary.averaging.bytes > 0
    assert summary.eval["accuracy"] > 0.6, "chance is a third"


def test_the_exported_model_is_what_was_evaluated(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    features, labels = samples(64, seed=7)
    job = a_job(batches([8] * 40), eval_data=[(features, labels)], pipeline=Pipeline(), averaging=Averaging(every=64))
    result = learn(swarm, tmp_path / "run", 4, job)
    model = job.model
    assert result.model is not None
    model.load_state_dict(load_file(result.model))
    model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(features), labels)
    assert float(loss) == pytest.approx(result.summary.eval["loss"], rel=1e-5)


def test_a_run_of_two_clusters_is_resumed_with_one(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    pool, used = batches([8] * 20), 0

    def until_saved() -> Iterator[Batch]:
        nonlocal used
        for used in itertools.count():
            if used % 20 == 0 and (tmp_path / "run/events.jsonl").exists() and "checkpoint" in kinds(tmp_path / "run"):
                raise KeyboardInterrupt
            yield pool[used % 20]

    job = partial(a_job, averaging=Averaging(every=64), checkpoint=every_updates(10), pipeline=Pipeline())
    stopped = learn(swarm, tmp_path / "run", 2, job(until_saved))
    assert stopped.summary.status == "stopped"
    longer = pool * (used // 20 + 2)
    resumed = swarm.train(job(longer), providers=2, run=tmp_path / "run", resume=True, display=False)
    assert resumed.summary.status == "finished"
    assert adds_up(resumed, len(longer))


def wait_for(run: Path, kind: str, count: int = 1) -> None:
    """Returns when the run has told so many events of this kind."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / 0.05)):
        if (run / "events.jsonl").exists() and kinds(run).count(kind) >= count:
            return
        pause.wait(0.05)
    raise AssertionError(f"no {kind} within {PATIENCE_SECONDS:.0f} s; there were {kinds(run)}")


def endless(ended: threading.Event) -> Callable[[], Iterator[Batch]]:
    """Batches until the test has seen enough; the last few come after that."""

    def data() -> Iterator[Batch]:
        while not ended.is_set():
            yield from batches([8] * 8)
        yield from batches([8] * 8)

    return data


def with_own_swarm(
    providers: int, act: Callable[[list[psutil.Process]], None], train: Callable[[EmbeddedSwarm], TrainResult]
) -> TrainResult:
    """Trains with providers of its own while `act` does something to their processes; what went wrong there is raised
    here."""
    before = set(psutil.Process().children())
    with EmbeddedSwarm(providers) as own:
        processes = [child for child in psutil.Process().children() if child not in before]
        failures: list[BaseException] = []

        def acting() -> None:
            try:
                act(processes)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=acting, daemon=True)
        thread.start()
        result = train(own)
        thread.join(PATIENCE_SECONDS)
        if failures:
            raise failures[0]
        return result


def test_a_killed_provider_ends_its_cluster_and_the_others_do_its_work(tmp_path: Path) -> None:
    run, ended = tmp_path / "run", threading.Event()

    def kill(processes: list[psutil.Process]) -> None:
        try:
            wait_for(run, "round", 2)
            processes[0].kill()
            wait_for(run, "cluster_lost")
        finally:
            ended.set()

    job = a_job(endless(ended), pipeline=Pipeline(), averaging=Averaging(every=64))
    result = with_own_swarm(4, kill, lambda own: learn(own, run, 2, job))
    summary = result.summary
    assert summary.status == "finished"
    assert adds_up(result, summary.ledger.fed)
    [fault] = summary.faults
    assert fault.kind == "provider_lost"
    [lost] = [event for event in read_events(run / "events.jsonl") if event["kind"] == "cluster_lost"]
    assert lost["cluster"] == fault.cluster and lost["replayed"] == summary.ledger.replayed


def test_a_provider_that_stops_is_left_out_and_catches_up_when_it_goes_on(tmp_path: Path) -> None:
    run, ended = tmp_path / "run", threading.Event()

    def stop(processes: list[psutil.Process]) -> None:
        try:
            wait_for(run, "round", 2)
            # On a busy machine somebody may have been late before.
            already = kinds(run).count("left_out")
            processes[1].send_signal(signal.SIGSTOP)
            wait_for(run, "left_out", already + 1)
            processes[1].send_signal(signal.SIGCONT)
            behind = kinds(run).count("round")
            wait_for(run, "round", behind + 6)
        finally:
            processes[1].send_signal(signal.SIGCONT)
            ended.set()

    job = a_job(endless(ended), pipeline=Pipeline(), averaging=Averaging(every=128))
    result = with_own_swarm(3, stop, lambda own: learn(own, run, 3, job, providers=3))
    assert adds_up(result, result.summary.ledger.fed)
    rounds = [event["reason"] for event in read_events(run / "events.jsonl") if event["kind"] == "round"]
    assert any("averaged by 2 clusters" in reason for reason in rounds), "the ring closes without it"
    assert "averaged by 3 clusters" in rounds[-1], "the last round makes all alike"


def test_statistics_of_batch_norms_are_averaged_and_counters_agree(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    job = a_job(batches([8] * 40), model=model, pipeline=Pipeline(), averaging=Averaging(every=64, codec="int8"))
    result = learn(swarm, tmp_path / "run", 2, job)
    assert result.model is not None
    found: dict[str, Any] = load_file(result.model)
    assert (found["1.running_var"] > 0).all()
    assert 20 <= int(found["1.num_batches_tracked"]) < 40, "the most that one of the clusters has seen"
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert not [line for line in lines if line["kind"] in ("left_out", "round_skipped")]

"""As many clusters as are asked for, of all providers, train one model: each does what it can, they average, and the
loss of one is not the end."""

import itertools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from ravnest import Averaging, Job, Pipeline
from ravnest.averaging.deadlines import RoundLimits
from ravnest.coordinator.health import lease as leases
from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.coordinator.launch.session import TrainResult
from ravnest.coordinator.run.timeouts import DEFAULT_TIMEOUTS, Timeouts
from ravnest.errors import PlanError
from ravnest.monitor.events import read_events
from tests.e2e.jobs import CLASSES, FEATURES, Batch, a_job, accuracy, batches, every_updates, samples
from tests.e2e.watching import PATIENCE_SECONDS, adds_up, endless, kinds, wait_for


def learn(
    swarm: EmbeddedSwarm, run: Path, clusters: int, job: Job, providers: int = 4, timeouts: Timeouts = DEFAULT_TIMEOUTS
) -> TrainResult:
    return swarm.train(job, providers=providers, clusters=clusters, run=run, display=False, timeouts=timeouts)


def check_clusters(result: TrainResult, stages: list[int], microbatches: int, before: dict[str, Tensor]) -> None:
    """All providers have a stage, in exactly so many clusters of so many; all of them have trained, and averaged."""
    summary = result.summary
    assert summary.status == "finished" and adds_up(result, microbatches)
    assert sorted(len(cluster.stages) for cluster in summary.clusters) == stages
    assert [cluster.id for cluster in summary.clusters] == list(range(len(stages)))
    held = [stage.provider for cluster in summary.clusters for stage in cluster.stages]
    assert len(set(held)) == sum(stages)
    assert sum(cluster.samples for cluster in summary.clusters) == summary.samples == 8 * microbatches
    averaging = summary.averaging
    assert averaging.rounds >= 1 and averaging.rings >= max(stages) and averaging.bytes > 0
    (planned,) = [event for event in read_events(result.run / "events.jsonl") if event["kind"] == "planned"]
    assert f"{len(stages)} clusters of" in planned["reason"] and "as averaging.every says" in planned["reason"]
    assert result.model is not None
    trained = load_file(result.model)
    assert trained.keys() == before.keys()
    assert all(torch.isfinite(trained[key]).all() and not torch.equal(trained[key], before[key]) for key in before)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


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
    before = state_of(job.model)
    result = learn(swarm, tmp_path / "run", 2, job, providers=3)
    check_clusters(result, [1, 2], 120, before)
    summary = result.summary
    assert all(cluster.samples > 0 for cluster in summary.clusters)
    assert summary.averaging.rounds >= 2 and summary.averaging.skipped == 0
    assert summary.averaging.rings == 2 or (averaging.fragments == 2 and summary.averaging.rings > 2)
    assert summary.eval["accuracy"] > 0.6, "chance is a third"


def test_the_exported_model_of_four_clusters_is_what_was_evaluated(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    features, labels = samples(64, seed=7)
    job = a_job(batches([8] * 40), eval_data=[(features, labels)], pipeline=Pipeline(), averaging=Averaging(every=64))
    model, before = job.model, state_of(job.model)
    result = learn(swarm, tmp_path / "run", 4, job)
    check_clusters(result, [1, 1, 1, 1], 40, before)
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


def acting(act: Callable[[], None], train: Callable[[], TrainResult]) -> TrainResult:
    """Trains while `act` does something to the providers' processes; what went wrong there is raised here."""
    failures: list[BaseException] = []

    def do() -> None:
        try:
            act()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    result = train()
    thread.join(PATIENCE_SECONDS)
    if failures:
        raise failures[0]
    return result


def test_a_cluster_whose_stage_nobody_can_take_ends_and_the_others_do_its_work(tmp_path: Path) -> None:
    run, ended = tmp_path / "run", threading.Event()

    def kill() -> None:
        try:
            wait_for(run, "round", 2)
            os.kill(own.processes["provider-0"], signal.SIGKILL)
            wait_for(run, "cluster_lost")
        finally:
            ended.set()

    job = a_job(endless(ended), pipeline=Pipeline(), averaging=Averaging(every=64))
    with EmbeddedSwarm(4) as own:
        result = acting(kill, lambda: learn(own, run, 2, job))
    summary = result.summary
    assert summary.status == "finished"
    assert adds_up(result, summary.ledger.fed)
    [fault] = summary.faults
    assert fault.kind == "provider_lost"
    [lost] = [event for event in read_events(run / "events.jsonl") if event["kind"] == "cluster_lost"]
    assert lost["cluster"] == fault.cluster and lost["replayed"] == summary.ledger.replayed


def test_a_provider_that_stops_is_left_out_and_catches_up_when_it_goes_on(
    swarm: EmbeddedSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A round leaves it out this soon. Until then it is not lost, although a standby could take its place.
    soon = Timeouts(rounds=RoundLimits(min_joining_seconds=1.0, min_reducing_seconds=1.0))
    monkeypatch.setitem(leases.SILENT_SECONDS, "standby", leases.SILENCE_SECONDS)
    run, ended = tmp_path / "run", threading.Event()
    process = psutil.Process(swarm.processes["provider-1"])

    def stop() -> None:
        try:
            wait_for(run, "round", 2)
            # On a busy machine somebody may have been late before.
            already = kinds(run).count("left_out")
            process.send_signal(signal.SIGSTOP)
            wait_for(run, "left_out", already + 1)
            process.send_signal(signal.SIGCONT)
            behind = kinds(run).count("round")
            wait_for(run, "round", behind + 6)
        finally:
            process.send_signal(signal.SIGCONT)
            ended.set()

    job = a_job(endless(ended), pipeline=Pipeline(), averaging=Averaging(every=128))
    result = acting(stop, lambda: learn(swarm, run, 3, job, providers=3, timeouts=soon))
    assert adds_up(result, result.summary.ledger.fed)
    rounds = [event["clusters"] for event in read_events(run / "events.jsonl") if event["kind"] == "round"]
    assert not kinds(run).count("lost"), "it was away for a while, and is the same again"
    assert 2 in rounds, "the ring closes without it"
    assert rounds[-1] == 3, "the last round makes all equal"


def test_statistics_of_batch_norms_are_averaged_and_counters_agree(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    job = a_job(batches([8] * 40), model=model, pipeline=Pipeline(), averaging=Averaging(every=64, codec="int8"))
    before = state_of(model)
    result = learn(swarm, tmp_path / "run", 2, job)
    check_clusters(result, [2, 2], 40, before)
    assert result.model is not None
    found = load_file(result.model)
    assert (found["1.running_var"] > 0).all()
    assert 20 <= int(found["1.num_batches_tracked"]) < 40, "the most that one of the clusters has seen"
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert not [line for line in lines if line["kind"] in ("left_out", "round_skipped")]


def test_providers_that_the_clusters_have_no_work_for_are_refused(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"3 clusters cannot be made of 2 providers"):
        swarm.train(a_job(), providers=2, clusters=3, run=tmp_path / "run", display=False)
    for wrong in (0, "two", True):
        with pytest.raises(PlanError, match=rf"clusters is {wrong!r}: give a whole number of at least 1"):
            swarm.train(a_job(), clusters=wrong, run=tmp_path / "run", display=False)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()

"""Any provider may vanish at any moment, and the run goes on: nothing is lost, nothing is applied twice."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ravnest import Averaging, Pipeline, TrainingError
from ravnest.coordinator.launch.session import TrainResult
from ravnest.coordinator.replicas import holders
from ravnest.coordinator.replicas import pace as replica_pace
from ravnest.monitor.events import Event, read_events
from ravnest.monitor.json_lines import read_lines
from ravnest.monitor.summary import Summary
from ravnest.planner.recovery import state_periods
from ravnest.planner.recovery.choose_coding import CodingChoice
from ravnest.state.codings import INT8
from tests.e2e.disturbing import HELD_OUT, POOL, RATE, Disturbed, Endless, disturbed, loss_of, plain
from tests.e2e.jobs import Batch, a_job, every_updates
from tests.e2e.watching import adds_up
from tests.swarms.embedded import SharedSwarm

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def supply() -> Iterator[SharedSwarm]:
    found = SharedSwarm(6)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas are made often."""
    for module in (replica_pace, state_periods):
        monkeypatch.setattr(module, "MIN_REPLICA_SECONDS", 0.3)


@pytest.fixture
def no_replicas(often: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_pace, "MIN_REPLICA_SECONDS", 1e9)


def told(result: TrainResult | Path, kind: str) -> list[Event]:
    run = result if isinstance(result, Path) else result.run
    return [event for event in read_events(run / "events.jsonl") if event["kind"] == kind]


def taken(run: Disturbed, stage: int, source: str = "replica", cluster: int = 0) -> Event:
    """Kills who holds a stage, and waits until somebody else has it."""
    victim = run.stages(cluster)[stage]
    run.from_now_on()
    run.kill(victim)
    assert "it was killed" in run.wait("lost", provider=victim)["reason"]
    begun = run.wait("failover_begun", cluster=cluster, stage=stage)
    assert (begun["lost"], begun["source"], begun["updates_lost"]) == (victim, source, 0)
    assert begun["taker"] in run.swarm.processes and begun["taker"] in begun["reason"]
    done = run.wait("failover", cluster=cluster, stages=[stage], takers=[begun["taker"]])
    parts = [done[f"{part}_seconds"] for part in ("detect", "decide", "fetch", "resume")]
    assert min(parts) >= 0 and sum(parts) == pytest.approx(done["seconds"], abs=0.01)
    return done


def check(result: TrainResult, faults: list[str]) -> None:
    """It has finished, its ledger adds up, and it has come back from the loss of each of these."""
    summary = result.summary
    assert summary.status == "finished"
    assert adds_up(result, summary.ledger.fed)
    counted = [event["replayed"] for kind in ("failover", "reformed", "cluster_lost") for event in told(result, kind)]
    assert summary.ledger.replayed == sum(counted)
    assert [(fault.kind, fault.provider) for fault in summary.faults] == [("provider_lost", name) for name in faults]
    assert all(fault.recovered_seconds is not None and fault.recovered_seconds >= 0 for fault in summary.faults)
    assert not told(result, "applied_twice")


def check_near(result: TrainResult, undisturbed: float | None = None) -> None:
    """It has learned about what it would have without any fault, and its last evaluation is of the model it gave."""
    if undisturbed is None:
        undisturbed = loss_of(plain(result.summary.ledger.fed))
    assert result.summary.eval["loss"] == pytest.approx(undisturbed, abs=0.05)
    assert result.model is not None
    model = plain(0)
    model.load_state_dict(load_file(result.model))
    assert result.summary.eval["loss"] == pytest.approx(loss_of(model), rel=1e-4)


def check_exact(result: TrainResult, accumulate: int = 1) -> None:
    """It has learned exactly what it would have without any fault."""
    assert result.model is not None
    found, undisturbed = load_file(result.model), plain(result.summary.ledger.fed, accumulate).state_dict()
    for name, value in undisturbed.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)


def check_once(result: TrainResult, stages: list[int]) -> None:
    """Each of these stages has applied every microbatch once."""
    applied = Counter((line["stage"], line["microbatch"]) for line in read_lines(result.run / "updates.jsonl"))
    expected = {(stage, microbatch): 1 for stage in stages for microbatch in range(result.summary.ledger.fed)}
    assert {key: count for key, count in applied.items() if key[0] in stages} == expected


def test_standbys_take_the_stages_of_root_stem_and_leaf_and_nothing_is_lost(
    supply: SharedSwarm, tmp_path: Path
) -> None:
    done: list[Event] = []
    names: list[str] = []

    def kill_all(run: Disturbed) -> None:
        run.wait("deployed")
        names.extend(run.stages())
        for stage in range(3):
            run.wait("replica")
            done.append(taken(run, stage))
        names.extend(run.stages())
        run.wait("replica")

    result = disturbed(supply.with_providers(6), tmp_path / "run", kill_all, providers=3)
    check(result, names[:3])
    check_near(result)
    assert len(set(names)) == 6, "three who began, and three who took their stages"
    [cluster] = result.summary.clusters
    assert [stage.provider for stage in cluster.stages] == names[3:]
    for fault, event in zip(result.summary.faults, done, strict=True):
        assert fault.recovered_seconds == pytest.approx(event["seconds"])
    assert not told(result, "reform_begun")


def test_a_standby_and_then_those_who_are_left_go_on_from_coded_replicas(
    supply: SharedSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = CodingChoice(INT8, "the test wants it")
    monkeypatch.setattr(holders, "choose_coding", lambda *arguments, **more: chosen)
    victims: list[str] = []

    def kill(run: Disturbed) -> None:
        run.wait("deployed")
        for _ in range(3):
            run.from_now_on()
            coded = run.wait("replica")
            # Coding a part as small as this one need not make it smaller.
            assert coded["sent_bytes"] not in (0, coded["bytes"])
        victims.append(run.stages()[1])
        taken(run, 1)
        run.wait("replica")
        victims.append(run.stages()[0])
        run.from_now_on()
        run.kill(victims[1])
        assert run.wait("reformed", clusters=1)["source"] == "replica"
        run.wait("replica")

    result = disturbed(supply.with_providers(4, exactly=True), tmp_path / "run", kill, providers=3)
    check(result, victims)
    # The tensors of this model are too small to be rounded.
    check_near(result)


def test_without_a_standby_the_model_is_cut_anew_over_those_who_are_left(supply: SharedSwarm, tmp_path: Path) -> None:
    victims: list[str] = []

    def kill(run: Disturbed) -> None:
        run.wait("replica")
        victims.append(run.stages()[1])
        run.kill(*victims)
        assert victims[0] in run.wait("reform_begun")["reason"]
        reformed = run.wait("reformed", clusters=1)
        assert reformed["source"] == "replica"
        run.wait("replica")

    result = disturbed(supply.with_providers(3, exactly=True), tmp_path / "run", kill, providers=3)
    check(result, victims)
    # All stages went back to the same replica: what follows is as if nothing had happened.
    check_exact(result)
    assert victims[0] not in [stage.provider for stage in result.summary.clusters[0].stages]


def test_the_last_two_go_one_after_the_other_and_the_run_can_be_resumed(supply: SharedSwarm, tmp_path: Path) -> None:
    run, saved = tmp_path / "run", every_updates(20)

    def kill_all(run: Disturbed) -> None:
        run.wait("replica")
        run.kill(run.stages()[0])
        run.wait("reformed", clusters=1)
        [last] = run.stages()
        run.wait("checkpoint")
        run.kill(last)
        run.wait("reform_begun")

    with pytest.raises(TrainingError) as raised:
        disturbed(supply.with_providers(2, exactly=True), run, kill_all, providers=2, checkpoint=saved)
    text = str(raised.value)
    assert (
        "which held stage 0, is gone: it was killed" in text and "no provider is connected" in text and "\n" not in text
    )
    assert text.endswith("the last good checkpoint is kept, continue from it with --resume")
    summary = Summary.read(run / "summary.json")
    assert (summary.status, summary.reason) == ("failed", text)
    assert [fault.recovered_seconds is None for fault in summary.faults] == [False, True]
    assert summary.ledger.applied_twice == 0

    def look(run: Disturbed) -> None:
        run.wait("failed")
        assert run.wait("started")["updates"] > 0
        run.wait("replica")

    resumed = disturbed(supply.with_providers(3), run, look, providers=3, checkpoint=saved, resume=True)
    assert resumed.summary.status == "finished"
    assert adds_up(resumed, resumed.summary.ledger.fed)
    check_exact(resumed)


def test_a_stage_of_one_of_two_clusters_is_taken_and_both_agree_at_the_end(supply: SharedSwarm, tmp_path: Path) -> None:
    victims: list[str] = []

    def kill(run: Disturbed) -> None:
        for cluster, stage in ((0, 1), (1, 0)):
            run.wait("round")
            run.wait("replica", cluster=cluster)
            victims.append(run.stages(cluster)[stage])
            taken(run, stage, cluster=cluster)
        for _ in range(3):
            run.wait("round")

    averaging = Averaging(every=128)
    result = disturbed(
        supply.with_providers(6),
        tmp_path / "run",
        kill,
        providers=4,
        clusters=2,
        pipeline=Pipeline(),
        averaging=averaging,
    )
    check(result, victims)
    job = a_job(
        list(islice(cycle(POOL), result.summary.ledger.fed)),
        eval_data=[HELD_OUT],
        optimizer=partial(torch.optim.SGD, lr=RATE),
        pipeline=Pipeline(),
        averaging=averaging,
    )
    undisturbed = supply.with_providers(4).train(
        job, providers=4, clusters=2, run=tmp_path / "undisturbed", display=False
    )
    check_near(result, undisturbed.summary.eval["loss"])
    assert not told(result, "cluster_lost")
    assert len(result.summary.clusters) == 2 and all(len(cluster.stages) == 2 for cluster in result.summary.clusters)
    assert told(result, "round")[-1]["clusters"] == 2, "the last round makes both equal"
    left_out = [event for event in told(result, "left_out") if event["at"] > told(result, "failover")[-1]["at"]]
    assert not left_out


def test_a_provider_that_is_killed_in_the_midst_of_an_evaluation(supply: SharedSwarm, tmp_path: Path) -> None:
    run, victims = tmp_path / "run", list[str]()
    swarm = supply.with_providers(4)
    features, labels = HELD_OUT
    parts = list(zip(features.split(20), labels.split(20), strict=True))

    def evaluated() -> Iterator[Batch]:
        yield from parts[:3]
        if not victims:
            here = Disturbed(swarm, run)
            victims.append(here.stages()[-1])
            here.kill(*victims)
        yield from parts[3:]

    def end(run: Disturbed) -> None:
        run.wait("replica")

    result = disturbed(swarm, run, end, providers=3, eval_data=evaluated)
    check(result, victims)
    assert result.summary.eval["loss"] == pytest.approx(loss_of(plain(result.summary.ledger.fed)), abs=0.05)
    [event] = told(result, "failover_begun")
    assert event["source"] == "replica"
    assert told(result, "evaluated")[-1]["reason"] == "on 200 samples", "each of them once"


def test_a_checkpoint_that_a_kill_interrupts_is_made_good_by_the_next(supply: SharedSwarm, tmp_path: Path) -> None:
    victims: list[str] = []

    def kill(run: Disturbed) -> None:
        run.wait("replica")
        run.wait("checkpoint")
        run.wait("checkpoint_begun")
        victims.append(run.stages()[-1])
        run.kill(*victims)
        run.wait("failover")
        run.wait("checkpoint")

    result = disturbed(supply.with_providers(3), tmp_path / "run", kill, providers=2, checkpoint=every_updates(5))
    check(result, victims)
    check_near(result)
    assert not told(result, "checkpoint_damaged") and not told(result, "upload_refused")


def test_an_iterator_is_trained_on_to_its_end_where_a_replica_was_kept(supply: SharedSwarm, tmp_path: Path) -> None:
    victims: list[str] = []

    def kill(run: Disturbed) -> None:
        run.wait("replica")
        victims.append(run.stages()[0])
        run.kill(*victims)
        assert run.wait("reformed")["source"] == "replica"

    result = disturbed(supply.with_providers(2, exactly=True), tmp_path / "run", kill, providers=2, walked=iter)
    check(result, victims)
    check_exact(result)


def test_microbatches_of_one_update_stay_together_when_a_stage_is_taken(supply: SharedSwarm, tmp_path: Path) -> None:
    victims: list[str] = []

    def kill(run: Disturbed) -> None:
        run.wait("replica")
        victims.append(run.stages()[0])
        taken(run, 0)
        run.wait("replica")

    pipeline = Pipeline(in_flight=1, accumulate=3, record_updates=True)
    result = disturbed(supply.with_providers(3), tmp_path / "run", kill, providers=2, pipeline=pipeline)
    check(result, victims)
    fed = result.summary.ledger.fed
    assert result.summary.updates == -(-fed // 3)
    assert result.summary.eval["loss"] == pytest.approx(loss_of(plain(fed, 3)), abs=0.05)


def test_two_who_are_killed_at_once_are_both_replaced_by_standbys(supply: SharedSwarm, tmp_path: Path) -> None:
    names: list[str] = []

    def kill(run: Disturbed) -> None:
        run.wait("replica")
        stages = sorted({stage for stage in run.warm().values() if stage is not None})
        assert len(stages) == 2
        names.extend(run.stages()[stage] for stage in stages)
        run.kill(*names)
        taken = run.wait("failover")
        assert set(taken["takers"]) <= run.warm().keys()
        if len(taken["stages"]) == 1:
            # The one was heard of before the other.
            run.wait("failover")
        run.wait("replica")

    result = disturbed(supply.with_providers(5, exactly=True), tmp_path / "run", kill, providers=3)
    check(result, sorted(names, key=[fault.provider for fault in result.summary.faults].index))
    check_near(result)
    assert len(result.summary.faults) == 2


def test_two_neighbours_who_held_each_others_replicas_send_the_run_back_to_its_checkpoint(
    supply: SharedSwarm, tmp_path: Path
) -> None:
    names: list[str] = []

    def kill(run: Disturbed) -> None:
        run.wait("checkpoint")
        run.wait("replica")
        # The leaf's part is with the stem, and the stem's with the leaf.
        names.extend(run.stages()[-2:])
        run.kill(*names)
        reformed = run.wait("reformed")
        assert reformed["source"] == "checkpoint" and reformed["replayed"] > 0
        run.wait("checkpoint")

    swarm = supply.with_providers(3, exactly=True)
    result = disturbed(swarm, tmp_path / "run", kill, providers=3, checkpoint=every_updates(10))
    assert {fault.provider for fault in result.summary.faults} == set(names)
    check(result, [fault.provider for fault in result.summary.faults])
    check_exact(result)


def test_before_there_is_a_replica_the_taker_begins_where_the_run_began(
    supply: SharedSwarm, tmp_path: Path, no_replicas: None
) -> None:
    victims: list[str] = []

    def kill(run: Disturbed) -> None:
        run.wait("deployed")
        run.seen("standby")
        victims.append(run.stages()[1])
        taken(run, 1, source="start")

    result = disturbed(supply.with_providers(4), tmp_path / "run", kill, providers=3)
    check(result, victims)
    check_near(result)
    # Whoever kept its stage has applied everything once.
    check_once(result, [0, 2])


def test_without_replica_and_standby_the_data_is_walked_again_from_the_start(
    supply: SharedSwarm, tmp_path: Path, no_replicas: None
) -> None:
    run, victims = tmp_path / "run", list[str]()
    swarm = supply.with_providers(3, exactly=True)

    def pausing(data: Endless) -> Callable[[], Iterator[Batch]]:
        def walk() -> Iterator[Batch]:
            for number, batch in enumerate(data):
                if number == 5 and not victims:
                    # As a stream that has nothing new for a while: what is lost is not found out by feeding.
                    here = Disturbed(swarm, run)
                    victims.append(here.stages()[2])
                    here.kill(*victims)
                    here.wait("reformed")
                yield batch

        return walk

    def look(run: Disturbed) -> None:
        reformed = run.wait("reformed", clusters=1)
        assert reformed["source"] == "start" and reformed["replayed"] > 0

    result = disturbed(swarm, run, look, providers=3, walked=pausing)
    check(result, victims)
    check_exact(result)


def test_an_iterator_cannot_be_walked_twice_and_that_is_told(
    supply: SharedSwarm, tmp_path: Path, no_replicas: None
) -> None:
    def kill(run: Disturbed) -> None:
        run.wait("first_update")
        run.kill(run.stages()[0])
        run.wait("reformed")

    swarm = supply.with_providers(2, exactly=True)
    with pytest.raises(TrainingError, match="train_data is an iterator"):
        disturbed(swarm, tmp_path / "run", kill, providers=2, walked=iter)
    summary = Summary.read(tmp_path / "run/summary.json")
    assert summary.status == "failed" and "an iterator" in summary.reason

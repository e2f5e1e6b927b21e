"""The benchmark of homes: what it draws, and what it reads from a run."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.homes_parts import without_state
from benchmarks.homes_parts.cases import CASES
from benchmarks.homes_parts.models import END, FIRST_LOSS, MODELS, UntilAsked, job_of
from benchmarks.homes_parts.population import KINDS, MAX_MACHINES, MIN_MACHINES, THREE, Population, draw
from benchmarks.homes_parts.reading import HomesRun, Snapshot, Traffic, read_run, state_bytes
from benchmarks.homes_parts.rows import run_row, run_targets
from benchmarks.homes_parts.swarm import slower
from ravnest.coordinator.replicas import pace, tracker
from ravnest.overrides import apply_overrides

NO_TRAFFIC = Snapshot(0.0, {"p0": 0}, {"p0": 0}, {}, 0.0)


def draws() -> list[Population]:
    return [draw(seed) for seed in range(200)]


def test_a_population_depends_on_its_seed_alone() -> None:
    assert draw(3) == draw(3)
    assert len({population.homes for population in draws()}) == 200


def test_drawn_homes_keep_to_the_ranges_of_their_kind_of_line() -> None:
    kinds = {kind.name: kind for kind in KINDS}
    for population in draws():
        assert MIN_MACHINES <= len(population.homes) <= MAX_MACHINES
        assert population.clusters in (1, 2) and (population.clusters == 1 or len(population.homes) >= 4)
        for home in population.homes:
            kind = kinds[home.kind]
            assert kind.up_mbps[0] * 0.95 <= home.up_mbps <= kind.up_mbps[1] * 1.05
            assert kind.down_per_up[0] * 0.9 <= home.down_mbps / home.up_mbps <= kind.down_per_up[1] * 1.1
            assert kind.round_trip_ms[0] * 0.95 <= home.round_trip_ms <= kind.round_trip_ms[1] * 1.05


def test_kinds_of_lines_are_as_frequent_as_their_shares_say() -> None:
    homes = [home for population in draws() for home in population.homes]
    assert sum(kind.share for kind in KINDS) == pytest.approx(1.0)
    for kind in KINDS:
        drawn = [home for home in homes if home.kind == kind.name]
        assert len(drawn) / len(homes) == pytest.approx(kind.share, abs=0.05)
        assert sum(home.nat for home in drawn) / len(drawn) == pytest.approx(kind.nat_share, abs=0.1)


def test_the_cases_have_every_kind_of_line_both_numbers_of_clusters_and_every_size() -> None:
    populations = [case.population for case in CASES.values()]
    assert {home.kind for population in populations for home in population.homes} >= {kind.name for kind in KINDS}
    assert {population.clusters for population in populations} >= {1, 2}
    assert {case.model for case in CASES.values()} == set(MODELS)
    assert {part for case in CASES.values() for part in case.parts} == {"state", "kills", "peers"}
    assert all(case.has_peers for case in CASES.values() if "peers" in case.parts)
    killed = {case.population for case in CASES.values() if "kills" in case.parts}
    assert killed == {case.population for case in CASES.values() if case.name != "quick"}


def test_the_round_trip_between_two_homes_is_the_sum_of_their_own() -> None:
    one, other, _ = THREE.homes
    assert 2 * THREE.one_way_ms(one, other) == one.round_trip_ms + other.round_trip_ms == 30


def test_homes_pretend_to_be_so_slow_that_half_of_the_cores_stay_idle() -> None:
    assert slower(3, 2) == 3.0
    assert slower(8, 2) == 8.0
    assert slower(2, 16) == 1.0


@pytest.mark.parametrize("name", ["gpt2-5", "wide-5"])
def test_a_model_has_its_number_of_parameters_and_begins_at_the_loss_of_a_guess(name: str) -> None:
    if name.startswith("gpt2"):
        pytest.importorskip("transformers")
    model = MODELS[name]
    made = model.made()
    assert sum(each.numel() for each in made.parameters()) == pytest.approx(model.parameters, rel=0.1)
    tokens, classes = next(model.batches(0))
    loss = float(model.loss(made(tokens), classes).detach())
    guess = math.log(model.vocabulary) if name.startswith("gpt2") else FIRST_LOSS
    assert loss == pytest.approx(guess, rel=0.15)


def test_wide_models_have_their_number_of_parameters() -> None:
    for million in (50, 200):
        with torch.device("meta"):
            made = MODELS[f"wide-{million}"].build()
        assert sum(each.numel() for each in made.parameters()) == pytest.approx(million * 1e6, rel=0.02)


def test_the_data_of_a_model_are_the_same_each_time_and_end_on_request(tmp_path: Path) -> None:
    data = UntilAsked(MODELS["wide-5"], tmp_path)
    first, again = iter(data), iter(data)
    for _ in range(3):
        assert all(torch.equal(one, other) for one, other in zip(next(first), next(again), strict=True))
    (tmp_path / END).touch()
    assert next(first, None) is None
    assert len(list(data)) == 2


def test_a_run_without_state_has_settings_that_the_job_takes(tmp_path: Path) -> None:
    job = apply_overrides(job_of("wide-5", tmp_path), without_state.SETTINGS)
    assert job.checkpoint.every_seconds is None and job.checkpoint.every_updates is None
    assert job.averaging.every is not None and job.averaging.every >= 10**9


def test_the_run_without_state_replaces_a_decision_that_the_coordinator_makes() -> None:
    assert getattr(tracker, without_state.DECISION) is pace.replica_due


EVENTS: list[dict[str, Any]] = [
    {"kind": "rings", "elapsed": 1, "round_seconds": 4.0},
    {"kind": "checkpoint_begun", "elapsed": 60},
    {"kind": "round", "elapsed": 61, "seconds": 3.0},
    {"kind": "suspected", "elapsed": 62},
    {"kind": "checkpoint", "elapsed": 75},
    {"kind": "checkpoint_begun", "elapsed": 100},
    {"kind": "replica", "elapsed": 101},
    {"kind": "replica_failed", "elapsed": 102},
    {"kind": "round", "elapsed": 110, "seconds": 6.0},
    {"kind": "round_skipped", "elapsed": 120},
    {"kind": "lost", "elapsed": 121},
]
METRICS: list[dict[str, Any]] = [
    *({"kind": "train", "at": 90 + number / 2, "loss": 3.0} for number in range(100)),
    {"kind": "stage", "at": 120, "snapshot_pause_seconds": 0.01},
    {"kind": "stage", "at": 121, "snapshot_pause_seconds": 0.03},
    {"kind": "stage", "at": 122},
]
SUMMARY: dict[str, Any] = {
    "predicted_samples_per_second": 10.0,
    "ledger": {"fed": 100},
    "clusters": [{"stages": [{}, {}]}, {"stages": [{}]}],
}


def a_run(events: list[dict[str, Any]], rate: float = 2.0, traffic: Snapshot | None = None) -> HomesRun:
    metrics = [{"kind": "train", "at": 100 + number / rate, "loss": 3.0} for number in range(int(30 * rate))]
    last = traffic or Snapshot(130.0, {"p0": 0}, {"p0": 0}, {}, 130.0)
    return read_run(events, metrics, SUMMARY, Snapshot(100.0, {"p0": 0}, {"p0": 0}, {}, 100.0), last, 4, 5.0)


def test_the_figures_of_a_run_are_those_of_its_events_and_of_the_measured_time() -> None:
    last = Snapshot(130.0, {"p0": 3_000_000}, {"p0": 600_000}, {"p0": 2_000_000}, 140.0, idle_seconds=70.0, cores=2)
    first = Snapshot(100.0, {"p0": 1_000_000}, {"p0": 0}, {"p0": 500_000}, 100.0, idle_seconds=40.0, cores=2)
    found = read_run(EVENTS, METRICS, SUMMARY, first, last, batch=4, finish_seconds=7.0)
    assert found.samples_per_second == pytest.approx(8.0)
    assert found.of_predicted == pytest.approx(0.8)
    assert (found.lost, found.suspected, found.replicas, found.replicas_failed) == (1, 1, 1, 1)
    assert [each.of_told for each in found.rounds] == [0.75, 1.5]
    assert (found.latest_round, found.rounds_skipped) == (1.5, 1)
    assert found.checkpoint_seconds == (15,)
    assert found.stages == (2, 1)
    assert (found.longest_pause_seconds, found.idle_share) == (0.03, 0.5)
    assert (found.losses[0], found.losses[-1], len(found.losses)) == ((0.0, 3.0), (40.0, 3.0), 81)
    # Per hour; the summary was written at other times than the lab was read.
    assert found.traffic["p0"].sent == pytest.approx(2_000_000 * 120)
    assert found.traffic["p0"].received == pytest.approx(600_000 * 120)
    assert found.traffic["p0"].between_stages == pytest.approx(1_500_000 * 90)


def test_a_run_that_stands_still_has_a_rate_and_misses_its_targets() -> None:
    few = [{"kind": "train", "at": 5.0, "loss": 3.0}] * 2
    found = read_run([], few, SUMMARY, NO_TRAFFIC, Snapshot(40.0, {"p0": 0}, {"p0": 0}, {}, 40.0), 4)
    assert found.samples_per_second == pytest.approx(0.2)
    nothing = read_run([], [], SUMMARY, NO_TRAFFIC, Snapshot(40.0, {"p0": 0}, {"p0": 0}, {}, 40.0), 4)
    assert (nothing.samples_per_second, nothing.losses) == (0.0, ())
    assert not any(target.met for target in run_targets("x", nothing, nothing)[:2])


def test_a_round_is_compared_with_what_was_told_last() -> None:
    corrected = [*EVENTS[:3], {"kind": "rounds_corrected", "seconds": 5.0}, {"kind": "round", "seconds": 6.0}]
    assert [each.of_told for each in a_run(corrected).rounds] == [0.75, 1.2]


def test_a_round_without_a_prediction_cannot_be_late() -> None:
    assert a_run([{"kind": "round", "seconds": 9.0}]).latest_round is None


def test_state_is_what_is_sent_beyond_the_activations_and_what_goes_with_them() -> None:
    without = Traffic(sent=110.0, received=0.0, between_stages=100.0)
    assert state_bytes(Traffic(sent=150.0, received=0.0, between_stages=50.0), without) == pytest.approx(95.0)
    assert state_bytes(Traffic(sent=50.0, received=0.0, between_stages=50.0), without) == 0.0
    # A provider that has a whole model sends no activations.
    nothing = Traffic(sent=10.0, received=0.0, between_stages=0.0)
    assert state_bytes(Traffic(sent=40.0, received=0.0, between_stages=0.0), nothing) == 30.0


def test_each_promise_of_a_run_has_a_target_that_it_can_miss() -> None:
    good, bad = a_run([], rate=3.0), a_run(EVENTS, rate=2.0)
    assert all(target.met for target in run_targets("x", good, good))
    missed = [target.name for target in run_targets("x", bad, good) if not target.met]
    assert missed == [
        "x: samples/s of predicted",
        "x: samples/s of no state",
        "x: providers lost",
        "x: replicas failed",
        "x: latest round of predicted",
    ]
    row = run_row("x", bad, good)
    assert row["of_no_state"] == pytest.approx(2 / 3, rel=1e-3)
    assert (row["replicas"], row["rounds"]) == ("1 (1 failed)", "2 (1 skipped)")

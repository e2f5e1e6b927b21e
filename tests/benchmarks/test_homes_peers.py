"""The benchmark of homes: how contenders are compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.homes_parts.peer_member import Place, steps_path
from benchmarks.homes_parts.peers import (
    Curve,
    averaging_seconds,
    common_loss,
    curve,
    interpreters,
    missing_hivemind,
    read_steps,
    seconds_to,
    smoothed,
    without_nat,
)
from benchmarks.homes_parts.population import THREE
from benchmarks.homes_parts.rows import peer_rows


def steps(times: list[float], averaged: list[int]) -> list[dict[str, Any]]:
    return [
        {"at": at, "samples": 4, "loss": 1.0, "averaged": number} for at, number in zip(times, averaged, strict=True)
    ]


def test_the_rate_of_a_peer_counts_whole_rounds_with_the_time_of_their_averaging() -> None:
    member = steps([10.0, 11.0, 12.0, 20.0, 21.0, 22.0], [0, 0, 0, 1, 1, 1])
    found = curve([member, member])
    # Three steps of two members in ten seconds; the steps after the averaging belong to the next round.
    assert found.samples_per_second == pytest.approx(2 * 12 / 10)
    assert found.averagings == 1
    assert len(found.points) == 12 and found.points[0] == (0.0, 1.0)


def test_the_rate_of_a_peer_that_never_averaged_counts_all_its_steps() -> None:
    found = curve([steps([10.0, 11.0, 12.0], [0, 0, 0])])
    assert (found.samples_per_second, found.averagings) == (4.0, 0)


def falling(start: float, per_second: float, count: int = 200) -> tuple[tuple[float, float], ...]:
    return tuple((float(second), start - per_second * second) for second in range(count))


def test_contenders_are_compared_at_the_lowest_loss_that_all_have_reached() -> None:
    assert smoothed([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)], over=2) == [(1.0, 2.0), (2.0, 4.0)]
    fast, slow = falling(3.0, 0.01), falling(3.0, 0.005)
    goal = common_loss([fast, slow])
    assert goal == pytest.approx(smoothed(slow)[-1][1])
    assert seconds_to(slow, goal) == 199.0
    reached = seconds_to(fast, goal)
    assert reached is not None and reached < 120.0
    assert seconds_to(slow, goal - 0.1) is None
    rows = peer_rows("x", {"a": Curve(2.0, 1, fast), "b": Curve(1.0, 3, slow)})
    assert [(row["case"], row["seconds_to_it"]) for row in rows] == [("x: a", reached), ("x: b", 199.0)]


def test_a_contender_that_hardly_trained_has_no_time_to_a_loss() -> None:
    rows = peer_rows("x", {"a": Curve(2.0, 1, falling(3.0, 0.01)), "b": Curve(0.0, 0, falling(3.0, 0.01, 5))})
    assert [row["seconds_to_it"] for row in rows] == [199.0, None]
    assert peer_rows("x", {"b": Curve(0.0, 0, ())})[0]["lowest_loss"] is None


def test_members_write_what_the_benchmark_reads_and_a_line_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    steps_path(tmp_path, 0).write_text('{"at": 1.0, "samples": 4}\n{"at": 2.')
    assert read_steps(tmp_path, 2) == [[{"at": 1.0, "samples": 4}], []]


def test_peers_get_the_same_lines_without_nat() -> None:
    open_lines = without_nat(THREE)
    assert not any(home.nat for home in open_lines.homes)
    assert [home.up_mbps for home in open_lines.homes] == [home.up_mbps for home in THREE.homes]
    # Twice the 20 MB of 5 million parameters over 10 Mbit/s.
    assert averaging_seconds(THREE, 5_000_000) == pytest.approx(32.0)


def test_the_place_of_a_member_survives_the_command_line() -> None:
    place = Place(0, 2, "10.0.0.1", "/tmp", "wide-5", 3.0, 100, 60.0)
    assert Place(**json.loads(place.text())) == place


def test_hivemind_is_left_out_with_a_reason_where_it_is_not_installed() -> None:
    assert "give one with --hivemind" in missing_hivemind(None)
    assert "No such file" in missing_hivemind("/nowhere/python")
    assert list(interpreters(None)) == ["DiLoCo over gloo"]
    assert interpreters("/x/python")["hivemind"] == ("hivemind_member", "/x/python")

"""A plan as JSON: every number of it, in a form that any program reads."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ravnest.planner.problem import Goal, Network, Provider
from ravnest.preview.as_json import FORMAT, plan_json
from tests.preview.planned import LAYERS, dry_run_of, fast_line, machines

DRY = dry_run_of(
    [machines("anna", "ben", "carla"), machines("emil", "fritz")],
    machines("dora"),
    Network(fast_line()),
    Goal(accumulate=2),
    explained=True,
)
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text()


def test_it_is_strict_json_and_the_same_after_a_round_trip() -> None:
    told = plan_json(DRY)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["format"] == FORMAT


def test_the_stages_of_every_cluster_cover_the_model_once() -> None:
    for cluster in plan_json(DRY)["clusters"]:
        stages = cluster["stages"]
        assert [stage["stage"] for stage in stages] == list(range(len(stages)))
        assert (stages[0]["start"], stages[-1]["end"]) == (0, LAYERS)
        assert all(a["end"] == b["start"] for a, b in itertools.pairwise(stages))
        assert sum(stage["parameters"] for stage in stages) == plan_json(DRY)["model"]["parameters"]
        assert stages[0]["first_parameter"] == "blocks.0.weight"
        assert stages[-1]["last_parameter"] == f"blocks.{LAYERS - 1}.weight"


def test_its_numbers_are_those_of_the_plan() -> None:
    told = plan_json(DRY)
    assert told["predicted_samples_per_second"] == DRY.plan.predicted_samples_per_second
    assert told["run_samples_per_second"] == DRY.plan.predicted_samples_per_second
    assert (
        plan_json(replace(DRY, plan=replace(DRY.plan, slowed=0.5)))["run_samples_per_second"]
        == told["run_samples_per_second"] / 2
    )
    assert [c["samples_per_second"] for c in told["clusters"]] == list(DRY.plan.rates)
    assert told["standbys"] == ["dora"]
    first = told["clusters"][0]
    assert first["staleness"] == 2  # four others in flight, two per update
    assert first["stages"][0]["link"] is None
    assert first["stages"][1]["link"] == {
        "bytes_per_second": 125e6,
        "back_bytes_per_second": 125e6,
        "round_trip_seconds": 0.001,
        "relayed": False,
        "codec": "float32",
        "codec_reason": "float32, as pipeline.codec says",
    }
    assert first["stages"][1]["compute_seconds"] == DRY.clusters[0].stages[1].compute_seconds


def test_the_rings_cover_every_parameter_once_with_an_owner_in_every_cluster() -> None:
    told = plan_json(DRY)
    rings = told["rings"]
    assert sum(ring["parameters"] for ring in rings) == told["model"]["parameters"]
    for ring in rings:
        assert len(ring["owners"]) == len(told["clusters"])
        for name in ring["owners"]:
            (stage,) = (s for c in told["clusters"] for s in c["stages"] if s["provider"] == name)
            assert stage["start"] <= ring["start"] and ring["end"] <= stage["end"]


def test_the_reasons_are_told_in_sentences_and_what_would_help_in_numbers() -> None:
    told = plan_json(DRY)
    assert all(sentence.endswith(".") for sentence in told["reasons"])
    assert any("dora stands by" in sentence for sentence in told["reasons"])
    assert told["what_ifs"] and all(one["samples_per_second"] > 0 for one in told["what_ifs"])


def test_what_has_no_limit_is_null() -> None:
    unlimited = [Provider(name=name, memory_bytes=8 << 30) for name in "ab"]
    told = plan_json(dry_run_of([unlimited], network=Network()))
    assert told["providers"]["a"]["up_bytes_per_second"] is None
    assert told["clusters"][0]["stages"][1]["link"]["bytes_per_second"] is None


def _keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        names = set() if set(value) & set(DRY.providers) else set(value)
        return names.union(*(_keys(each) for each in value.values()))
    return set().union(*(_keys(each) for each in value)) if isinstance(value, list) else set()


@pytest.mark.parametrize("key", sorted(_keys(plan_json(DRY))))
def test_every_field_is_on_the_page(key: str) -> None:
    section = PAGE.partition("## The plan as JSON")[2]
    assert re.search(rf"`(\w+\[?\]?\.)*{key}(\[\])?`", section), key

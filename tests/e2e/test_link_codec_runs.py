"""Runs whose activations and gradients travel in a codec: fewer bytes, nearly the same result, and it is told."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from tests.e2e.codec_runs import a_net, batches, links, trained


def events(run: Path) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "codec"]


@pytest.mark.parametrize(("codec", "share"), [("int8", 0.35), ("bfloat16", 0.6), ("float16", 0.6)])
def test_a_codec_takes_fewer_bytes_and_learns_as_well(
    codec: str, share: float, swarm: EmbeddedSwarm, tmp_path: Path
) -> None:
    plain, packed = trained(swarm, tmp_path / "plain"), trained(swarm, tmp_path / "packed", codec=codec)
    assert packed["eval"]["loss"] == pytest.approx(plain["eval"]["loss"], abs=0.01)
    assert packed["eval"]["loss"] != plain["eval"]["loss"]
    assert [link["codec"] for link in links(packed)] == [codec] * 4
    for uncoded, coded in zip(links(plain), links(packed), strict=True):
        # Evaluations travel as they are.
        assert coded["bytes_sent"] < share * uncoded["bytes_sent"]
        assert coded["bytes_raw"] == pytest.approx(uncoded["bytes_sent"], rel=0.03)
        assert uncoded["bytes_raw"] == uncoded["bytes_sent"]


def test_lossless_takes_fewer_bytes_and_learns_the_same_to_the_bit(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    plain, packed = trained(swarm, tmp_path / "plain"), trained(swarm, tmp_path / "packed", codec="lossless")
    assert packed["eval"]["loss"] == plain["eval"]["loss"]
    weights, same = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "packed"))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert [link["codec"] for link in links(packed)] == ["lossless"] * 4
    for uncoded, coded in zip(links(plain), links(packed), strict=True):
        assert coded["bytes_sent"] < 0.92 * uncoded["bytes_sent"], "less is saved of small tensors"


def test_what_is_evaluated_is_the_model_as_it_is_used_without_a_codec(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    summary = trained(swarm, tmp_path / "run", codec="int8")
    model = a_net()
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    with torch.no_grad():
        losses = [float(F.cross_entropy(model(x), y)) for x, y in batches(10, 2)]
    assert summary["eval"]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_on_one_machine_nothing_is_coded_and_the_run_says_why(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    summary = trained(swarm, tmp_path / "run")
    assert {link["codec"] for link in links(summary)} == {"float32"}
    assert [event["codec"] for event in events(tmp_path / "run")] == ["float32", "float32"]
    assert all("no line lies between them" in json.dumps(event) for event in events(tmp_path / "run"))

"""Bytes that an update moves: the count is right for known operators, and low for a stage's update."""

import pytest
import torch
from torch import nn

from benchmarks.update_parts.traffic import CACHE_BYTES, Traffic
from ravnest.engine.stage import Stage
from ravnest.graph.capture.capture import capture
from ravnest.spec import OptimizerSpec
from tests.engine.stages import stages_of

_LARGE = CACHE_BYTES
"""Values of a tensor that is four times as large as the cache."""


def test_large_tensors_are_read_and_written_once_for_each_operator() -> None:
    one, other = torch.ones(_LARGE), torch.ones(_LARGE)
    with Traffic() as traffic:
        one.copy_(other)
        assert traffic.moved_bytes() == pytest.approx(8 * _LARGE, rel=0.01)
        one.view(-1)[: _LARGE // 2].detach()
        assert traffic.moved_bytes() == pytest.approx(8 * _LARGE, rel=0.01)
        one.add_(other)
        assert traffic.moved_bytes() == pytest.approx(20 * _LARGE, rel=0.01)
        torch.add(one, other)
        assert traffic.moved_bytes() == pytest.approx(32 * _LARGE, rel=0.01)


def test_a_tensor_that_stays_in_the_cache_is_moved_once() -> None:
    small = torch.ones(CACHE_BYTES // 16)
    with Traffic() as traffic:
        for _ in range(10):
            small.mul_(2).add_(1)
    assert traffic.moved_bytes() == pytest.approx(2 * small.nbytes, rel=0.1)


@pytest.mark.parametrize(("correction", "least"), [("none", 28), ("nesterov", 28), ("cautious", 32)])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_an_update_moves_little_more_than_the_least(correction: str, least: int, clip_norm: float | None) -> None:
    stage = _stale_stage(correction, clip_norm)
    with Traffic() as traffic:
        stage.update(3)
        stage.correction.forward_weights()
    values = sum(master.numel() for name, master in stage.state_tensors().items() if name.startswith("param:"))
    # Clipping by norm reads the gradients once more.
    assert least < traffic.moved_bytes() / values < 1.35 * (least + 4 * (clip_norm is not None))


def _stale_stage(correction: str, clip_norm: float | None) -> Stage:
    """A stage of 9 million parameters before an update of moments that exist, with a microbatch in flight."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 65536), nn.Linear(65536, 64))
    batch = torch.randn(2, 64), torch.randn(2, 64)
    found = capture(net, nn.functional.mse_loss, {}, [batch])
    spec = OptimizerSpec("AdamW", {"lr": 1e-4})
    [stage] = stages_of(found, [found.graph], spec, correction=correction, clip_norm=clip_norm)
    for number in range(5):
        stage.forward(number, found.structure.flatten(batch))
        if number:
            stage.backward(number - 1, None)
        if 0 < number < 4:
            stage.update(number - 1)
    return stage

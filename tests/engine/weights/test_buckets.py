"""A large stage is updated bucket by bucket to save memory, with the same result bit for bit."""

from collections.abc import Mapping
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from ravnest.engine.weights.buckets import foreach_buckets, update_buckets
from ravnest.graph.capture.capture import capture
from ravnest.spec import OptimizerSpec
from tests.e2e.jobs import a_net, batches
from tests.engine.stages import stages_of


def trained(
    optimizer: OptimizerSpec, clip_norm: float | None = None, accumulate: int = 1
) -> Mapping[str, torch.Tensor]:
    """The whole state of a stage after a few updates of a small net."""
    data = batches([8, 8, 8, 8])
    found = capture(a_net(), F.cross_entropy, {}, data)
    [stage] = stages_of(found, [found.graph], optimizer, clip_norm=clip_norm, accumulate=accumulate)
    for number, batch in enumerate(data):
        stage.forward(number, found.structure.flatten(batch))
        stage.backward(number, None)
        stage.update(number)
    return stage.state()[0]


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adafactor"])
@pytest.mark.parametrize(("clip_norm", "accumulate"), [(None, 1), (0.1, 1), (None, 2)])
def test_an_update_in_buckets_is_bitwise_the_update_at_once(
    monkeypatch: pytest.MonkeyPatch, name: str, clip_norm: float | None, accumulate: int
) -> None:
    whole = trained(OptimizerSpec(name, {"lr": 0.01}), clip_norm, accumulate)
    parameters = {key: tensor for key, tensor in whole.items() if key.startswith("param:")}
    small = partial(update_buckets, min_bytes=1)
    assert len(update_buckets(parameters)) == 1 and len(small(parameters)) > 1
    monkeypatch.setattr("ravnest.engine.stage.update_buckets", small)
    in_buckets = trained(OptimizerSpec(name, {"lr": 0.01}), clip_norm, accumulate)
    assert whole.keys() == in_buckets.keys()
    for key, tensor in whole.items():
        assert torch.equal(tensor, in_buckets[key]), key


def test_every_parameter_is_in_one_bucket_and_the_largest_come_last() -> None:
    parameters = {f"p{size}": torch.zeros(size) for size in (50, 1, 7, 20, 3)}
    buckets = update_buckets(parameters, min_bytes=40)
    assert [name for bucket in buckets for name in bucket] == ["p1", "p3", "p7", "p20", "p50"]
    assert len(buckets) > 1 and all(buckets)
    assert update_buckets({}) == [[]]


def test_small_parameters_share_a_call_and_a_large_one_on_a_cpu_has_its_own() -> None:
    tensors = [torch.zeros(size) for size in (1, 2, 3, 50, 1, 9, 1, 70, 80)]
    found = foreach_buckets(tensors, lambda tensor: tensor, min_bytes=40)
    assert [[len(tensor) for tensor in bucket] for bucket in found] == [[1, 2, 3], [50], [1, 9], [1], [70], [80]]
    assert foreach_buckets([], lambda tensor: tensor) == []

"""A large stage is updated piece by piece to save memory; nobody can tell from the weights."""

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F

from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.engine.weights import buckets as pieces_module
from ravnest.graph.capture.capture import capture
from ravnest.spec import OptimizerSpec
from tests.e2e.jobs import a_net, batches


def trained(
    optimizer: OptimizerSpec, clip_norm: float | None = None, accumulate: int = 1
) -> tuple[Mapping[str, torch.Tensor], int]:
    """The stage's whole state after a few updates of a small net, and in how many pieces each was made."""
    data = batches([8, 8, 8, 8])
    found = capture(a_net(), F.cross_entropy, {}, data)
    settings = StageSettings(optimizer=optimizer.to_json(), clip_norm=clip_norm, accumulate=accumulate)
    stage = Stage(found.graph, {key: weight.clone() for key, weight in found.weights.items()}, settings)
    for number, batch in enumerate(data):
        stage.forward(number, found.structure.flatten(batch))
        stage.backward(number, None)
        stage.update(number)
    tensors = stage.state()[0]
    return tensors, len(pieces_module.pieces({n: t for n, t in tensors.items() if n.startswith("param:")}))


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adafactor"])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_an_update_in_pieces_is_bitwise_the_update_at_once(
    monkeypatch: pytest.MonkeyPatch, name: str, clip_norm: float | None
) -> None:
    whole, one = trained(OptimizerSpec(name, {"lr": 0.01}), clip_norm)
    monkeypatch.setattr(pieces_module, "PIECE_BYTES", 1)
    pieces, several = trained(OptimizerSpec(name, {"lr": 0.01}), clip_norm)
    assert one == 1 and several > 1
    assert whole.keys() == pieces.keys()
    for key, tensor in whole.items():
        assert torch.equal(tensor, pieces[key]), key


def test_summed_gradients_are_applied_in_pieces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = trained(OptimizerSpec("AdamW", {"lr": 0.01}), accumulate=2)
    monkeypatch.setattr(pieces_module, "PIECE_BYTES", 1)
    pieces, _ = trained(OptimizerSpec("AdamW", {"lr": 0.01}), accumulate=2)
    assert all(torch.equal(tensor, pieces[key]) for key, tensor in whole.items())


def test_every_parameter_is_in_one_piece_and_the_largest_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "PIECE_BYTES", 40)
    parameters = {f"p{size}": torch.zeros(size) for size in (50, 1, 7, 20, 3)}
    pieces = pieces_module.pieces(parameters)
    assert [name for piece in pieces for name in piece] == ["p1", "p3", "p7", "p20", "p50"]
    assert len(pieces) > 1 and all(pieces)


def test_small_parameters_share_a_call_and_a_large_one_on_a_processor_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces_module, "_BATCH_BYTES", 40)
    sizes = [1, 2, 3, 50, 1, 9, 1, 70, 80]
    found = pieces_module.batches([torch.zeros(size) for size in sizes], lambda tensor: tensor)
    assert [[len(tensor) for tensor in batch] for batch in found] == [[1, 2, 3], [50], [1, 9], [1], [70], [80]]
    assert pieces_module.batches([], lambda tensor: tensor) == []
    assert pieces_module.pieces({}) == [[]]

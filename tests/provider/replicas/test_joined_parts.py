"""Parts of several stages of a replica, as one that is cut elsewhere begins with them."""

import json

import pytest
import torch

from ravnest.errors import GraphError
from ravnest.provider.replicas.format import Restored, joined


def a_part(key: str, step: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    tensors = {
        f"param:{key}": torch.full((2,), float(step)),
        f"optim:{key}:exp_avg": torch.ones(2),
        f"outer:{key}": torch.ones(2),
        f"anchor:{key}": torch.zeros(2),
        "param:tied": torch.full((1,), float(step)),
    }
    optimizer = {"values": {f"{key}:step": step}, "groups": [{"lr": 0.1}]}
    metadata = {"version": "5", "schedule": "null", "applied": "[1, 2]", "rings": '{"0": [3, 4]}'}
    return tensors, {**metadata, "optimizer": json.dumps(optimizer)}


def test_all_tensors_and_values_are_there_and_nothing_of_rounds_and_microbatches_before() -> None:
    tensors, metadata = joined([a_part("a", 1), a_part("b", 2)])
    assert set(tensors) == {"param:a", "param:b", "param:tied", *(f"{k}:{n}" for k in ("outer",) for n in "ab")} | {
        "optim:a:exp_avg",
        "optim:b:exp_avg",
    }
    assert float(tensors["param:tied"]) == 1.0, "of the first that has it"
    assert json.loads(metadata["optimizer"]) == {"values": {"a:step": 1, "b:step": 2}, "groups": [{"lr": 0.1}]}
    assert (metadata["version"], metadata["schedule"]) == ("5", "null")
    restored = Restored.of(tensors, metadata)
    assert set(restored.optimizer) == {"a", "b"} and not restored.anchors and not restored.rings
    assert restored.applied.numbers() == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"values": 3}'])
def test_an_unreadable_part_is_reported(text: str) -> None:
    tensors, metadata = a_part("a", 1)
    with pytest.raises(GraphError, match="cannot be read"):
        joined([(tensors, {**metadata, "optimizer": text})])

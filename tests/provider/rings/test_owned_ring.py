"""A ring as one of its owners keeps it."""

import torch

from ravnest.averaging.settings import RingSettings
from ravnest.net.v1.control_pb2 import Ring
from ravnest.provider.replicas.format import Restored
from ravnest.provider.rings.owned_ring import OwnedRing
from ravnest.spec import OptimizerSpec


def test_a_replica_of_a_stage_that_is_catching_up_goes_with_the_new_anchor() -> None:
    tensors = {"param:w": torch.zeros(2), "buffer:n": torch.tensor(3)}
    ring = Ring(ring=0, parameters=["w"], counters=["n"])
    owned = OwnedRing.of(ring, RingSettings(), OptimizerSpec("SGD", {"lr": 0.1}), tensors, Restored())
    owned.catch_up(1, torch.tensor([5.0, 7.0]))
    # The stage has learned 1 in each parameter, and has not followed its anchor yet.
    copy = {"param:w": torch.ones(2), "buffer:n": torch.tensor(4)}
    owned.complete(copy, shifted=0)
    assert {name: tensor.tolist() for name, tensor in copy.items()} == {
        "param:w": [6.0, 8.0],
        "anchor:w": [5.0, 7.0],
        "buffer:n": 4,
    }

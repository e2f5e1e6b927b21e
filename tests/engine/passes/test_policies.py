"""The promises of every version policy and of the split backward about gradients, on every model."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ravnest.errors import TrainingError
from ravnest.spec import OptimizerSpec
from ravnest.version_policy import POLICIES
from tests.engine.driven_line import ADAM, Line, same
from tests.exactness.plain_loop import copied, kept_generator
from tests.graph.cutting import ALL


def train(line: Line, microbatches: int, in_flight: int, **more: Any) -> list[torch.Tensor]:
    """The losses of training with `in_flight` microbatches in flight at all stages."""
    losses = []
    with kept_generator():
        for number in range(microbatches):
            losses.append(line.forward(number))
            if number >= in_flight - 1:
                line.backward(number - in_flight + 1, **more)
        for number in range(max(0, microbatches - in_flight + 1), microbatches):
            line.backward(number, **more)
    return losses


def close(have: Sequence[dict[str, torch.Tensor]], want: Sequence[dict[str, torch.Tensor]]) -> None:
    for mine, theirs in zip(have, want, strict=True):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            if tensor.is_floating_point() and tensor.numel():
                scale = float(tensor.abs().max().clamp(min=1e-6))
                assert torch.allclose(mine[name], tensor, atol=2e-6 * scale, rtol=0), name
            else:
                assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("name", ALL)
def test_recomputing_gives_the_same_bits_as_keeping(name: str) -> None:
    kept, again = Line(name, 2), Line(name, 2, versions="recompute")
    assert [float(a) for a in train(kept, 5, 3)] == [float(a) for a in train(again, 5, 3)]
    same(again, kept)


@pytest.mark.parametrize("name", ALL)
def test_starting_to_recompute_in_the_middle_changes_no_bit(name: str) -> None:
    kept, changed = Line(name, 2), Line(name, 2)
    losses = [float(a) for a in train(kept, 6, 3)]
    with kept_generator():
        have = [changed.forward(0), changed.forward(1), changed.forward(2)]
        changed.backward(0)
        assert [stage.start_recomputing() for stage in changed.stages[:-1]] == [True] * (len(changed.stages) - 1)
        assert not changed.stages[-1].start_recomputing(), "a leaf keeps nothing to compute again"
        for number in (3, 4, 5):
            have.append(changed.forward(number))
            changed.backward(number - 2)
        changed.backward(4)
        changed.backward(5)
    assert [float(a) for a in have] == losses
    same(changed, kept)


@pytest.mark.parametrize("name", ALL)
def test_a_split_backward_gives_the_same_gradients(name: str) -> None:
    whole, parts = Line(name, 3), Line(name, 3, split_backward=True)
    train(whole, 3, 2)
    train(parts, 3, 2)
    close(parts.sent, whole.sent)
    close([parts.state()], [whole.state()])


@pytest.mark.parametrize("name", ["gpt_tied", "resnet", "hf_gpt2", "unet"])
def test_a_split_backward_computes_nothing_twice(name: str) -> None:
    whole, parts = Line(name, 2), Line(name, 2, split_backward=True)
    counted = {}
    with kept_generator():
        for line in (whole, parts):
            line.forward(0)
            leaf = line.stages[-1]
            with FlopCounterMode(display=False) as first:
                leaf.backward(0, None)
            with FlopCounterMode(display=False) as rest:
                leaf.finish_backward()
            counted[line] = first.get_total_flops(), rest.get_total_flops()
    assert not whole.stages[-1].splits_backward and parts.stages[-1].splits_backward
    assert counted[whole][1] == 0 and counted[parts][1] > 0
    assert sum(counted[parts]) == counted[whole][0]


def test_a_root_and_a_stage_without_products_do_not_split_the_backward() -> None:
    assert [stage.splits_backward for stage in Line("cnn", 3, split_backward=True).stages] == [False, True, True]
    line = Line("gru", 2, split_backward=True)
    assert [stage.splits_backward for stage in line.stages] == [False, True]


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("versions", POLICIES)
@pytest.mark.parametrize("name", ["cnn", "gpt_tied", "in_place"])
def test_with_one_in_flight_every_policy_is_the_same(name: str, versions: str, split_backward: bool) -> None:
    options = {"accumulate": 2, "clip_norm": 0.5}
    plain = Line(name, 3, ADAM, **options)
    other = Line(name, 3, ADAM, versions=versions, split_backward=split_backward, **options)
    train(plain, 5, 1)
    train(other, 5, 1)
    assert [stage.version for stage in other.stages] == [2, 2, 2]
    for stages in (plain.stages, other.stages):
        for stage in stages:
            # Apply the gradients left over, as at the end of a run.
            assert stage.update(4, flush=True) is not None
    close(other.sent, plain.sent)
    close([other.state()], [plain.state()])


def test_double_uses_the_weights_of_the_forward_and_holds_two_versions() -> None:
    many, two = Line("cnn", 3, accumulate=4), Line("cnn", 3, accumulate=4, versions="double")
    train(many, 9, 4)
    alive = []
    with kept_generator():
        for number in range(9 + 4):
            if number < 9:
                two.forward(number)
                alive.append(max(stage.versions_alive for stage in two.stages))
            if 0 <= number - 3 < 9:
                two.backward(number - 3)
    assert max(alive) == 2
    same(two, many)


def test_double_refuses_more_in_flight_than_make_an_update() -> None:
    line = Line("cnn", 2, accumulate=2, versions="double")
    line.forward(0)
    line.forward(1)
    with pytest.raises(TrainingError, match=r"microbatch 2 came while 2 are in flight .* pipeline.accumulate or less"):
        line.forward(2)
    line.backward(0)
    line.forward(2)


def test_latest_copies_no_weights_and_a_backward_uses_the_current_ones() -> None:
    momentum = OptimizerSpec("SGD", {"lr": 0.05, "momentum": 0.9})
    line, fresh = Line("lstm", 2, momentum, versions="latest"), Line("lstm", 2, momentum)
    root = line.stages[0]
    places = {name: tensor.data_ptr() for name, tensor in root.state_tensors().items()}
    with kept_generator():
        line.forward(0)
        line.forward(1)
        line.backward(0)
        assert root.versions_alive == 1
        fresh.forward(0)
        fresh.backward(0)
        # A forward with the current weights and the same gradients from behind gives the same backward.
        fresh.forward(1)
        behind = {v.name: torch.ones_like(line.sent[-2][v.name]) for v in root.graph.sends if v.name in line.sent[-2]}
        root.backward(1, behind)
        fresh.stages[0].backward(1, behind)
    update = root.update(1)
    fresh.stages[0].update(1)
    mine, theirs = root.state_tensors(), fresh.stages[0].state_tensors()
    assert any(name.endswith(":momentum_buffer") for name in theirs)
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name
    assert update is not None and update.staleness == 1, "the forward was one update older"
    assert places == {name: mine[name].data_ptr() for name in places}


def test_latest_sends_values_that_do_not_change_with_the_weights() -> None:
    line = Line("OneLayerFourTimes", 2, versions="latest")
    root, made = line.stages[0], line.example.made
    tied = {p.name for p in root.graph.parameters} & {v.name for v in root.graph.sends}
    assert tied, "the layer is sent on to the next stage"
    fed = line.example.captured.structure.flatten(copied(made.batches[0]))
    fed |= line.stages[-1].look_up(0, fed)
    sent = root.forward(0, {v.name: fed[v.name] for v in (*root.graph.inputs, *root.graph.from_stages)})
    before = {name: sent[name].clone() for name in tied}
    root.backward(0, {v.name: torch.ones_like(sent[v.name]) for v in root.graph.sends if v.needs_grad})
    root.update(0)
    assert all(torch.equal(sent[name], before[name]) for name in tied)


@pytest.mark.parametrize("versions", POLICIES)
def test_batch_norm_statistics_are_updated_once(versions: str) -> None:
    line = Line("cnn", 3, versions=versions, accumulate=2)
    train(line, 4, 2)
    counters = [t for name, t in line.state().items() if name.endswith("num_batches_tracked")]
    assert counters and all(int(counter) == 4 for counter in counters)


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("versions", POLICIES)
def test_a_shift_reaches_the_current_weights(versions: str, split_backward: bool) -> None:
    line = Line("cnn", 2, versions=versions, accumulate=2, split_backward=split_backward)
    with kept_generator():
        line.forward(0)
        line.forward(1)
        root = line.stages[0]
        before = {name: tensor.clone() for name, tensor in root.state_tensors().items()}
        adds = {name: torch.full_like(t, 0.5) for name, t in before.items() if name.startswith("param:")}
        root.shift(adds)
        for name in adds:
            assert torch.equal(root.state_tensors()[name], before[name] + 0.5)
        line.backward(0)
        line.backward(1)
    assert root.version == 1
    other = Line("cnn", 2, versions=versions, accumulate=2, split_backward=split_backward)
    with kept_generator():
        other.forward(0)
        other.forward(1)
        other.backward(0)
        other.backward(1)
    if POLICIES[versions].keeps_weights:
        # The gradients are those of the weights before: what was added stays on top.
        for name in adds:
            assert torch.allclose(root.state_tensors()[name], other.stages[0].state_tensors()[name] + 0.5, atol=1e-6)


@pytest.mark.parametrize("versions", POLICIES)
def test_a_restored_stage_continues_as_before(versions: str) -> None:
    line = Line("cnn", 2, ADAM, versions=versions, accumulate=2, split_backward=True)
    train(line, 4, 2)
    again = Line("cnn", 2, ADAM, versions=versions, accumulate=2, split_backward=True)
    for old, new in zip(line.stages, again.stages, strict=True):
        tensors, metadata = old.state()
        optimizer: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(":")
            if kind == "optim":
                key, _, entry = rest.rpartition(":")
                optimizer.setdefault(key, {})[entry] = tensor.clone()
        new.restore(optimizer, metadata)
        for name, tensor in new.state_tensors().items():
            tensor.data.copy_(tensors[name])
    line.sent.clear()
    train(line, 4, 2)
    train(again, 4, 2)
    same(again, line)

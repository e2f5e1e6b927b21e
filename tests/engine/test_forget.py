"""A stage that discards its microbatches in flight continues as if it had never seen them; a replay changes nothing."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from ravnest.version_policy import POLICIES
from tests.engine.driven_line import ADAM, Line, same
from tests.exactness.plain_loop import kept_generator


def go(line: Line, numbers: Iterable[int], in_flight: int = 2) -> None:
    """Trains these microbatches with `in_flight` of them in flight."""
    waiting: list[int] = []
    with kept_generator():
        for number in numbers:
            line.forward(number)
            waiting.append(number)
            if len(waiting) == in_flight:
                line.backward(waiting.pop(0))
        for number in waiting:
            line.backward(number)


def forget(line: Line) -> None:
    for stage in line.stages:
        stage.forget()
        assert stage.in_flight == 0 and stage.versions_alive == 1 and stage.is_between_updates
    line.sent.clear()


@pytest.mark.parametrize("correction", ["none", "foresight", "cautious"])
@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("versions", POLICIES)
def test_discarded_microbatches_have_no_effect(versions: str, split_backward: bool, correction: str) -> None:
    options = {"versions": versions, "split_backward": split_backward, "correction": correction, "accumulate": 3}
    one, other = Line("cnn", 3, ADAM, **options), Line("cnn", 3, ADAM, **options)
    for line in (one, other):
        go(line, range(6))
    with kept_generator():
        one.forward(6)
        one.backward(6)
        one.forward(7)
        one.forward(8)
        # Its gradients are found, and those of its weights not asked for yet.
        one.stages[-1].backward(7, None)
    forget(one)
    other.sent.clear()
    for line in (one, other):
        go(line, range(6, 12))
        assert all(stage.version == 4 for stage in line.stages)
    same(one, other)


@pytest.mark.parametrize("correction", ["none", "predict", "foresight", "cautious"])
@pytest.mark.parametrize("versions", ["stash", "recompute", "latest"])
def test_versions_of_discarded_microbatches_are_released(versions: str, correction: str) -> None:
    options = {"versions": versions, "correction": correction}
    one, other = Line("gpt_tied", 2, ADAM, **options), Line("gpt_tied", 2, ADAM, **options)
    for line in (one, other):
        go(line, range(4), 3)
        with kept_generator():
            line.forward(4)
            line.forward(5)
            if line is one:
                line.forward(6)
            line.backward(4)
            if line is one:
                line.forward(7)
            line.backward(5)
    forget(one)
    other.sent.clear()
    for line in (one, other):
        go(line, range(6, 9), 3)
    same(one, other)


@pytest.mark.parametrize("versions", POLICIES)
def test_the_state_contains_only_applied_microbatches(versions: str) -> None:
    one, other = Line("cnn", 3, versions=versions, accumulate=2), Line("cnn", 3, versions=versions, accumulate=2)
    for line in (one, other):
        go(line, range(2))
    with kept_generator():
        one.forward(2)
        one.backward(2)
        one.forward(3)
    for mine, theirs in zip(one.stages, other.stages, strict=True):
        have, want = mine.state(), theirs.state()
        assert have[1] == want[1] and have[0].keys() == want[0].keys()
        assert all(torch.equal(tensor, want[0][name]) for name, tensor in have[0].items())
    counters = [name for name in one.state() if name.endswith("num_batches_tracked")]
    assert counters and all(int(one.state()[name]) == 4 for name in counters)


@pytest.mark.parametrize("versions", POLICIES)
def test_a_shift_remains_when_microbatches_in_flight_are_discarded(versions: str) -> None:
    one, other = Line("cnn", 2, versions=versions, accumulate=2), Line("cnn", 2, versions=versions, accumulate=2)
    go(one, range(2))
    go(other, range(2))
    with kept_generator():
        one.forward(2)
        one.forward(3)
        for line in (one, other):
            for stage in line.stages:
                stage.shift({name: torch.ones_like(tensor) for name, tensor in stage.state_tensors().items()})
        # Computed a second time where the policy does so, with the states of the first time.
        one.backward(2)
    forget(one)
    other.sent.clear()
    same(one, other)
    go(one, range(2, 4))
    go(other, range(2, 4))
    same(one, other)


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("versions", POLICIES)
@pytest.mark.parametrize("name", ["cnn", "gpt_tied", "in_place"])
def test_a_replayed_microbatch_is_computed_and_changes_nothing(name: str, versions: str, split_backward: bool) -> None:
    options: dict[str, Any] = {"versions": versions, "split_backward": split_backward, "accumulate": 2}
    line = Line(name, 3, **options)
    go(line, range(3))
    before = {name: tensor.clone() for name, tensor in line.state().items()}
    # One that is summed already waits on, and is not disturbed.
    assert all(not stage.is_between_updates for stage in line.stages)
    fresh = Line(name, 3, **options)
    for old, new in zip(line.stages, fresh.stages, strict=True):
        for key, tensor in new.state_tensors().items():
            tensor.data.copy_(old.state_tensors()[key])
    line.sent.clear()
    forward = [stage.forward for stage in line.stages]
    with kept_generator():
        for stage, plain in zip(line.stages, forward, strict=True):
            stage.forward = lambda m, v, plain=plain: plain(m, v, again=True)  # type: ignore[method-assign,assignment,misc]
        loss = line.forward(1)
        gradients: dict[str, torch.Tensor] | None = None
        for stage in reversed(line.stages):
            gradients = stage.backward(1, gradients)
            line.sent.append({name: gradient.clone() for name, gradient in gradients.items()})
        if line.stages[-1].graph.lookups:
            line.stages[-1].add_row_gradients(1, gradients or {}, again=True)
        assert torch.equal(loss, fresh.forward(1))
        fresh.backward(1)
    for name, tensor in line.state().items():
        assert torch.equal(tensor, before[name]), name
    assert all(stage.in_flight == 0 and stage.versions_alive == 1 for stage in line.stages)
    if not split_backward:
        for mine, theirs in zip(line.sent, fresh.sent, strict=True):
            assert all(torch.equal(mine[name], gradient) for name, gradient in theirs.items())

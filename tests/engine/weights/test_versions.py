"""A backward sees the weights of its forward, and no more copies are held than versions are in use."""

import pytest
import torch

from ravnest.engine.weights.versions import WeightVersions


def some_versions() -> WeightVersions:
    return WeightVersions({"weight": torch.zeros(4)})


def update(versions: WeightVersions, value: float) -> None:
    versions.begin_update()
    with torch.no_grad():
        versions.masters["weight"].fill_(value)
    versions.finish_update()


def memory(versions: WeightVersions) -> int:
    return versions.masters["weight"].data_ptr()


def test_an_update_writes_in_place_while_no_microbatch_holds_the_version() -> None:
    versions = some_versions()
    before, current = memory(versions), versions.current
    update(versions, 1.0)
    assert memory(versions) == before
    assert versions.current is current and current.number == 1
    assert current.leaves["weight"].tolist() == [1.0] * 4


def test_a_version_that_is_held_keeps_its_weights() -> None:
    versions = some_versions()
    held = versions.acquire()
    update(versions, 1.0)
    assert held.leaves["weight"].tolist() == [0.0] * 4 and held.number == 0
    assert versions.current.leaves["weight"].tolist() == [1.0] * 4 and versions.current.number == 1


def test_a_held_version_costs_one_copy_however_many_updates_follow() -> None:
    versions = some_versions()
    versions.acquire()
    update(versions, 1.0)
    place = memory(versions)
    update(versions, 2.0)
    update(versions, 3.0)
    assert memory(versions) == place


def test_two_microbatches_of_one_version_share_it() -> None:
    versions = some_versions()
    first, second = versions.acquire(), versions.acquire()
    assert first is second
    versions.release(first)
    update(versions, 1.0)
    assert second.leaves["weight"].tolist() == [0.0] * 4, "one of them still holds it"


def test_a_gradient_is_computed_with_the_weights_of_the_forward() -> None:
    versions = some_versions()
    held = versions.acquire()
    loss = (held.leaves["weight"] - 3).square().sum()
    update(versions, 5.0)
    [gradient] = torch.autograd.grad(loss, [held.leaves["weight"]])
    assert gradient.tolist() == [-6.0] * 4


def test_a_version_cannot_be_released_more_often_than_it_was_acquired() -> None:
    versions = some_versions()
    versions.release(versions.acquire())
    with pytest.raises(AssertionError):
        versions.release(versions.current)


def test_a_parameter_that_no_backward_reads_is_written_in_place_while_a_version_is_held() -> None:
    versions = WeightVersions({"weight": torch.zeros(4), "table": torch.zeros(4)}, unread=["table"])
    held = versions.acquire()
    table, weight = versions.masters["table"].data_ptr(), versions.masters["weight"].data_ptr()
    update(versions, 1.0)
    assert versions.masters["table"].data_ptr() == table and versions.masters["weight"].data_ptr() != weight
    assert held.leaves["weight"].tolist() == [0.0] * 4


def test_a_version_of_predicted_weights_does_not_hold_those_that_no_backward_reads() -> None:
    versions = WeightVersions({"weight": torch.zeros(4), "table": torch.zeros(4)}, unread=["table"])
    predicted = {"weight": torch.ones(4), "table": torch.ones(4)}
    one, other = versions.acquire(predicted), versions.acquire(predicted)
    assert one.leaves["weight"] is predicted["weight"]
    assert one.leaves["table"].data_ptr() == versions.masters["table"].data_ptr()
    assert versions.copy_of(one) == versions.copy_of(other) != versions.copy_of(versions.current)

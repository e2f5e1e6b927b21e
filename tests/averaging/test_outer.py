"""Outer optimizers: the step that a ring takes."""

import pytest
import torch

from ravnest.averaging.outer.nesterov import momentum_for
from ravnest.averaging.outer.outer import outer_named
from ravnest.errors import RavnestError


def test_the_mean_steps_by_the_mean_difference() -> None:
    outer = outer_named("mean")
    difference = torch.tensor([1.0, -2.0])
    assert outer.step(difference).tolist() == [1.0, -2.0]
    assert outer.state is None and not outer.keeps_state
    assert outer_named("mean", rate=0.5).step(difference).tolist() == [0.5, -1.0]


def test_nesterov_looks_ahead_along_its_velocity() -> None:
    outer = outer_named("nesterov", rate=0.5, momentum=0.5)
    assert outer.step(torch.tensor([4.0])).tolist() == [0.5 * (4 + 0.5 * 4)]
    assert outer.step(torch.tensor([4.0])).tolist() == [0.5 * (4 + 0.5 * 6)]
    assert outer.state is not None and outer.state.tolist() == [6.0]


def test_nesterov_on_a_long_vector_is_the_same_everywhere_in_it() -> None:
    outer = outer_named("nesterov")
    step = outer.step(torch.ones(600_000))
    assert torch.allclose(step, torch.tensor(1.5)) and bool((step == step[0]).all())


def test_the_defaults_of_nesterov() -> None:
    assert outer_named("nesterov").step(torch.tensor([1.0])).tolist() == pytest.approx([1.5])


def test_the_default_momentum_grows_with_the_number_of_clusters() -> None:
    assert momentum_for(1) == 0.0
    assert momentum_for(4) == pytest.approx(0.5)
    # A constant difference is multiplied by the square root of the number of clusters in the long run.
    assert 1 / (1 - momentum_for(9)) == pytest.approx(3.0)


def test_an_unknown_outer_optimizer_is_named_with_the_known_ones() -> None:
    with pytest.raises(RavnestError, match=r"'adam'.*mean, nesterov"):
        outer_named("adam")
    with pytest.raises(RavnestError, match="momentum"):
        outer_named("mean", momentum=0.9)

"""Public architectures, small and with random weights, are captured; the full list is `benchmarks.architectures`."""

import pytest

from benchmarks.architectures import QUICK, captured
from ravnest.graph.cutting.partition import max_stages


@pytest.mark.parametrize("name", QUICK)
def test_an_architecture_is_captured_and_can_be_cut(name: str) -> None:
    assert max_stages(captured(QUICK[name]).graph) >= 4

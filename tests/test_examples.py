"""The example of one cluster: three stages of the real engine train with stale gradients, and the loss falls."""

import re
from pathlib import Path

import pytest

from examples import one_cluster


def test_one_cluster_of_three_stages_trains_and_tells_its_staleness(capsys: pytest.CaptureFixture[str]) -> None:
    stages, _ = one_cluster.cut_model()
    assert len(stages) == 3 and all(stage.graph.parameters for stage in stages)
    losses, staleness = one_cluster.train()
    assert len(losses) == one_cluster.MICROBATCHES
    assert [len(each) for each in staleness] == [one_cluster.MICROBATCHES] * 3
    # The last stage updates right after its forward; the root has as many microbatches in flight as it may.
    assert [max(each) for each in staleness] == [one_cluster.IN_FLIGHT - 1, 1, 0]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    said = capsys.readouterr().out
    assert f"microbatch 60: loss {losses[59]:.3f}, staleness 2, 1, 0" in said


def test_the_example_fits_into_60_lines_of_code() -> None:
    source = Path(one_cluster.__file__).read_text(encoding="utf-8")
    without_docstrings = re.sub(r'""".*?"""', "", source, flags=re.DOTALL)
    assert len([line for line in without_docstrings.splitlines() if line.strip()]) <= 60

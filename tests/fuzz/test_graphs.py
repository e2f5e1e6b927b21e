"""Short run of the graph fuzzer: earlier findings and a few hundred random graphs, with guard pages if available."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ravnest.graph.operators.allowed import OVERLOADS
from tests.fuzz.graphs.cases import CALLS, case
from tests.fuzz.graphs.found import CRASHES, found
from tests.fuzz.graphs.memory import build, missing

_GRAPHS = 300
_INSIDE = """
import json, os, sys
from pathlib import Path
import torch
from tests.fuzz.graphs.cases import case
from tests.fuzz.graphs.found import CRASHES, found
from tests.fuzz.graphs.isolated import trials
from tests.fuzz.graphs.memory import GuardedMemory

torch.set_num_threads(1)
memory = GuardedMemory(Path(os.environ["LD_PRELOAD"])) if os.environ.get("LD_PRELOAD") else None
names = list(CRASHES)
known = trials(lambda number: found(names[number]), range(len(names)), memory)
others = trials(case, range(3_000_000, 3_000_000 + int(sys.argv[1])), memory)
failures = {names[f.case.number]: str(f) for f in known.failures}
print(json.dumps([known.graphs, failures, others.graphs, list(map(str, others.failures)), others.ended[""]]))
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, str], int, list[str], int]:
    """Number of known graphs, their failures, number of random graphs, their failures, and how many ran to the end."""
    library = "" if missing() else str(build(tmp_path_factory.mktemp("guard")))
    environment = {**os.environ, "LD_PRELOAD": library, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _INSIDE, str(_GRAPHS)],
        env=environment,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
        check=True,
    )
    known, failed, others, failures, ended = json.loads(done.stdout)
    return known, failed, others, failures, ended


def test_what_once_ended_a_process_ends_in_an_error(outcome: tuple[int, dict[str, str], int, list[str], int]) -> None:
    known, failed, _, _, _ = outcome
    assert failed == {}
    assert known == len(CRASHES)


def test_random_graphs_neither_crash_nor_hang_nor_show_foreign_memory(
    outcome: tuple[int, dict[str, str], int, list[str], int],
) -> None:
    _, _, others, failures, ended = outcome
    assert failures == []
    assert others == _GRAPHS
    assert ended > _GRAPHS // 5, "enough graphs must reach a kernel"


def test_every_allowed_operator_has_valid_calls_to_start_from() -> None:
    assert set(CALLS) == OVERLOADS
    assert all(CALLS.values())


def test_a_number_names_one_graph() -> None:
    assert case(41).to_json() == case(41).to_json() != case(42).to_json()
    assert [found(name).graph_json() for name in CRASHES]

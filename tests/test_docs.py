"""What the documentation says is what the code does: fields, defaults, options, operators, examples."""

import argparse
import dataclasses
import importlib
import itertools
import json
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ravnest
from ravnest.cli.main import COMMANDS
from ravnest.coordinator.feeder import first_batches
from ravnest.graph import ops
from ravnest.graph.capture import capture
from ravnest.graph.partition import most_stages
from ravnest.graph.portable import PortableGraph
from ravnest.jobfile import load_job
from ravnest.monitor.run_directory import RunPaths
from ravnest.monitor.summary import ClusterSummary, Ledger, StageSummary, Summary

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
README = (ROOT / "README.md").read_text()
TRAINING = (ROOT / "docs" / "training.md").read_text()
GRAPH = (ROOT / "docs" / "portable-graph.md").read_text()


def test_the_readme_job_loads_captures_and_can_be_cut_for_the_command_it_shows(tmp_path: Path) -> None:
    code = next(block for block in _blocks(README, "python") if "ravnest.Job(" in block)
    path = tmp_path / "spirals.py"
    path.write_text(code)
    job = load_job(str(path))
    graph = capture(job.model, job.loss, job.metrics, first_batches(job)).graph
    asked = re.search(r"ravnest train spirals\.py --providers (\d+)", README)
    assert asked is not None
    assert most_stages(graph) >= int(asked[1])


@pytest.mark.parametrize("settings", [ravnest.Job, ravnest.Pipeline, ravnest.Checkpoint])
def test_every_field_is_documented_with_its_default(settings: Any) -> None:
    for field in dataclasses.fields(settings):
        row = re.search(rf"^\| `{field.name}` \| (.+?) \|", TRAINING, re.MULTILINE)
        assert row is not None, f"docs/training.md does not tell of {settings.__name__}.{field.name}"
        assert row[1].strip("`") == _default(field), f"the default of {settings.__name__}.{field.name}"


@pytest.mark.parametrize("command", ["train", "serve", "join", "invite", "kick", "doctor", "status", "export"])
def test_every_option_of_a_command_is_documented_and_no_other(command: str) -> None:
    documented = re.search(rf"^ravnest {command} .*$", TRAINING, re.MULTILINE)
    assert documented is not None
    assert set(re.findall(r"--[a-z-]+", documented[0])) == _options(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_a_page_shows_can_be_given(page: Path) -> None:
    for line in re.findall(r"(?:^|`)ravnest (\w.*?)(?:`|$)", page.read_text(), re.MULTILINE):
        name, *arguments = line.split()
        if name in COMMANDS:
            given = {
                argument.strip("[]").partition("=")[0] for argument in arguments if argument.strip("[").startswith("--")
            }
            assert given <= _options(name), f"{page.name}: ravnest {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        there = page if not path else (page.parent / path).resolve()
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in _anchors(there), f"{page.name} links to {target}"


def test_every_make_target_a_page_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"`make (\w+)`", page.read_text()):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"


def test_every_dependency_has_its_line_and_its_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "dependencies.md").read_text()
    pinned = "".join((ROOT / name).read_text() for name in ("requirements.lock", "requirements-dev.lock"))
    for wanted in itertools.chain(project["dependencies"], *project["optional-dependencies"].values()):
        name = re.split(r"[<>=~]", wanted)[0]
        assert re.search(rf"^\| .*\b{name}\b.* \|", page, re.MULTILINE), f"docs/dependencies.md lacks {name}"
        assert re.search(rf"^{name}==", pinned, re.MULTILINE | re.IGNORECASE), f"no lock file pins {name}"


def test_every_file_the_architecture_names_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for name in re.findall(r"`([a-z_]+/[a-z_]+\.py)`", text):
        assert (ROOT / "ravnest" / name).exists(), name


def test_the_operators_on_the_page_are_the_allow_list() -> None:
    blocks = [block.split() for block in _blocks(GRAPH, "")]
    assert sorted(ops._ATEN) in blocks, textwrap.fill(" ".join(sorted(ops._ATEN)), 116)
    assert list(ops._PYTHON) in blocks


def test_the_graph_on_the_page_is_what_capture_makes() -> None:
    shown = PortableGraph.from_json(_blocks(GRAPH, "json")[0])
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    batch = torch.randn(16, 4), torch.randint(0, 3, (16,))
    made = capture(model, F.cross_entropy, {"accuracy": _accuracy}, [batch]).graph
    assert _without_size_names(made) == _without_size_names(shown)


def test_every_entry_of_the_run_directory_is_documented() -> None:
    paths = [value for value in vars(RunPaths).values() if isinstance(value, property)]
    names = {Path(str(path.fget(RunPaths(Path("run"))))).name for path in paths if path.fget is not None}
    assert names <= set(re.findall(r"^\| `([\w.]+)/?` \|", TRAINING, re.MULTILINE))


@pytest.mark.parametrize("record", [Summary, ClusterSummary, StageSummary, Ledger])
def test_every_field_of_the_summary_is_documented(record: Any) -> None:
    section = TRAINING.partition("**`summary.json`:**")[2]
    for field in dataclasses.fields(record):
        assert f"`{field.name}`" in section, f"{record.__name__}.{field.name}"


def _accuracy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(dim=1) == labels).float().mean()


def _blocks(text: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for kind, block in found if kind == language]


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is not dataclasses.MISSING:
        return str(field.default)
    if field.default_factory is dataclasses.MISSING:
        return "required"
    return "{}" if field.default_factory is dict else f"{type(field.default_factory()).__name__}()"


def _options(command: str) -> set[str]:
    subparsers = argparse.ArgumentParser().add_subparsers()
    importlib.import_module(f"ravnest.cli.{command}").add_parser(subparsers)
    actions = subparsers.choices[command]._actions
    shown = (action for action in actions if action.help != argparse.SUPPRESS)
    return {option for action in shown for option in action.option_strings if option.startswith("--")} - {"--help"}


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _without_size_names(graph: PortableGraph) -> Any:
    """The graph as plain data; how torch calls a free size differs from version to version."""
    return json.loads(re.sub(r'"s\d+"', '"size"', graph.to_json()))

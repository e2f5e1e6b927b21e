"""Checks of the documentation against the code: fields, defaults, options, operators, limits, names and examples."""

import argparse
import dataclasses
import importlib
import itertools
import json
import pkgutil
import re
import textwrap
import tomllib
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from torch import nn

import ravnest
import ravnest.net
from ravnest.cli.main import COMMANDS
from ravnest.coordinator.feed.feeder import first_batches
from ravnest.coordinator.report.phase import LAST, NEXT, Phase
from ravnest.graph.capture.capture import capture
from ravnest.graph.cutting.partition import max_stages
from ravnest.graph.operators.allowed import TABLE
from ravnest.graph.operators.python_numbers import FUNCTIONS
from ravnest.graph.ops import OWN_GRADIENT
from ravnest.graph.portable import FORMAT_VERSION, PortableGraph
from ravnest.graph.portable_reader import read_graph
from ravnest.jobfile import load_job
from ravnest.microbatch import Marks
from ravnest.monitor.run_directory import RunPaths
from ravnest.monitor.summary import ClusterSummary, MicrobatchCounts, StageSummary, Summary
from ravnest.net.frames.encoding import encode
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.frames.tensor_bytes import WIRE_DTYPES
from ravnest.net.identity.swarm_invite import SwarmInvite
from ravnest.net.v1 import control_pb2
from ravnest.net.version import PROTOCOL_VERSION

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
NOT_OURS = {"spirals.py", "file.py", "path/to/file.py", "lab.toml", "nodes.toml"}
"""Files of a user that pages use as examples."""

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
README = (ROOT / "README.md").read_text()
TRAINING = (ROOT / "docs" / "training.md").read_text()
GRAPH = (ROOT / "docs" / "portable-graph.md").read_text()
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text()
LIMITS = re.findall(r"^\| .+? \| (\d[^|]*) \| `([\w.\[\]]+)` \| .+ \|$", PROTOCOL, re.MULTILINE)


def test_the_readme_job_loads_captures_and_can_be_cut_for_the_command_it_shows(tmp_path: Path) -> None:
    code = next(block for block in _blocks(README, "python") if "ravnest.Job(" in block)
    path = tmp_path / "spirals.py"
    path.write_text(code)
    job = load_job(str(path))
    graph = capture(job.model, job.loss, job.metrics, first_batches(job)).graph
    asked = re.search(r"ravnest train spirals\.py --providers (\d+)", README)
    assert asked is not None
    assert max_stages(graph) >= int(asked[1])


@pytest.mark.parametrize("settings", [ravnest.Job, ravnest.Pipeline, ravnest.Averaging, ravnest.Checkpoint])
def test_every_field_is_documented_with_its_default(settings: Any) -> None:
    # Settings of different parts may have the same name: each is looked for behind its own heading.
    table = TRAINING[max(0, TRAINING.find(f"\n`ravnest.{settings.__name__}`")) :]
    for field in dataclasses.fields(settings):
        row = re.search(rf"^\| `{field.name}` \| (.+?) \|", table, re.MULTILINE)
        assert row is not None, f"docs/training.md does not tell of {settings.__name__}.{field.name}"
        assert row[1].strip("`") == _default(field), f"the default of {settings.__name__}.{field.name}"


@pytest.mark.parametrize("command", COMMANDS)
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


LOCKS = ("requirements.lock", "requirements-dev.lock", "requirements-fuzz.lock")


def test_every_dependency_has_its_line_and_its_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "dependencies.md").read_text()
    pinned = "".join((ROOT / name).read_text() for name in LOCKS)
    for wanted in itertools.chain(project["dependencies"], *project["optional-dependencies"].values()):
        name = re.split(r"[<>=~]", wanted)[0]
        assert re.search(rf"^\| .*\b{name}\b.* \|", page, re.MULTILINE), f"docs/dependencies.md lacks {name}"
        assert re.search(rf"^{name}==", pinned, re.MULTILINE | re.IGNORECASE), f"no lock file pins {name}"


@pytest.mark.parametrize("page", [*PAGES, RESULTS], ids=lambda page: page.name)
def test_every_file_and_folder_a_page_names_exists(page: Path) -> None:
    for name in _named_paths(page.read_text()) - NOT_OURS:
        assert _exists(name), f"{page.name} names {name}"


@pytest.mark.parametrize("page", [*PAGES, RESULTS], ids=lambda page: page.name)
def test_every_module_a_page_names_exists(page: Path) -> None:
    for name in re.findall(r"\b((?:ravnest|tests|benchmarks)(?:\.[a-zA-Z]\w*)+)", page.read_text()):
        if not name.startswith(("ravnest.v1", "benchmarks.NAME")):
            _resolve(name)


def test_the_rooms_on_the_page_are_those_of_the_import_contracts() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for contract in contracts:
        for container in contract.get("containers", ()):
            room = container.removeprefix("ravnest.")
            row = re.search(rf"^\| `{room}/` \| (`.+) \|$", page, re.MULTILINE)
            assert row is not None, f"docs/architecture.md does not list the rooms of {room}/"
            shown = [layer.replace("`", "").replace(".py", "").split(" and ") for layer in row[1].split(", ")]
            assert shown == [layer.split(" | ") for layer in contract["layers"]], f"{room}/: {contract['layers']}"


def test_the_phases_on_the_page_are_those_of_the_state_machine() -> None:
    [shown] = _blocks((ROOT / "docs" / "architecture.md").read_text(), "mermaid")
    lines = ["stateDiagram-v2", *(f"    {p.name}: {p.value}" for p in Phase if p not in LAST)]
    lines += [f"    {p.name} --> {after.name}" for p in Phase for after in Phase if after in NEXT[p]]
    assert shown.strip() == "\n".join(lines), "\n".join(lines)


def test_the_operators_on_the_page_are_the_allow_list() -> None:
    blocks = [block.split() for block in _blocks(GRAPH, "")]
    assert TABLE.split() in blocks, textwrap.fill(" ".join(TABLE.split()), 116)
    assert [OWN_GRADIENT, *FUNCTIONS] in blocks


def test_the_graph_on_the_page_is_what_capture_makes() -> None:
    shown = read_graph(_blocks(GRAPH, "json")[0])
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    batch = torch.randn(16, 4), torch.randint(0, 3, (16,))
    made = capture(model, F.cross_entropy, {"accuracy": _accuracy}, [batch]).graph
    assert _without_size_names(made) == _without_size_names(shown)


def test_every_entry_of_the_run_directory_is_documented() -> None:
    paths = [value for value in vars(RunPaths).values() if isinstance(value, property)]
    names = {Path(str(path.fget(RunPaths(Path("run"))))).name for path in paths if path.fget is not None}
    assert names <= set(re.findall(r"^\| `([\w.]+)/?` \|", TRAINING, re.MULTILINE))


@pytest.mark.parametrize("record", [Summary, ClusterSummary, StageSummary, MicrobatchCounts])
def test_every_field_of_the_summary_is_documented(record: Any) -> None:
    section = TRAINING.partition("**`summary.json`:**")[2]
    for field in dataclasses.fields(record):
        assert f"`{field.name}`" in section, f"{record.__name__}.{field.name}"


@pytest.mark.parametrize(("shown", "constant"), LIMITS, ids=[constant for _, constant in LIMITS])
def test_every_limit_of_the_protocol_is_the_code_s(shown: str, constant: str) -> None:
    number, _, unit = shown.partition(" ")
    assert float(number) * _UNITS[unit] == pytest.approx(_limit(constant))


def test_no_limit_of_the_transport_is_left_out() -> None:
    section = PROTOCOL.partition("\n## Limits\n")[2].partition("\n## ")[0]
    assert len(LIMITS) == len(re.findall(r"^\| ", section, re.MULTILINE)) - 1, "a row that no test reads"
    documented = {constant.rpartition(".")[2] for _, constant in LIMITS}
    kinds = "SECONDS|BYTES|FRAMES|CHARACTERS|LIFETIME|SKEW"
    for module in pkgutil.walk_packages(ravnest.net.__path__, "ravnest.net."):
        text = Path(importlib.import_module(module.name).__file__ or "").read_text()
        for name in re.findall(rf"^([A-Z][A-Z_]*_(?:{kinds}))\b.* = ", text, re.MULTILINE):
            assert name in documented, f"docs/protocol.md has no row for {module.name}.{name}"


def test_the_protocol_page_tells_the_versions() -> None:
    assert f"of the messages and frames: {PROTOCOL_VERSION} " in PROTOCOL
    assert f"of the portable graph: {FORMAT_VERSION} " in PROTOCOL


def test_the_frame_on_the_page_is_what_encode_makes() -> None:
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    frame = Frame(FrameKind.FORWARD, 7, marks=Marks(samples=2), generation=1, tensors={"h": tensor})
    assert bytes.fromhex(_blocks(PROTOCOL, "hex")[0]) == encode(frame)


def test_the_invite_on_the_page_has_the_key_on_the_page() -> None:
    line, key = (block.strip() for block in _blocks(PROTOCOL, "")[:2])
    token = SwarmInvite.parse(line).token
    assert f"`{token.id}`" in PROTOCOL
    public = token.root(0.0).public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
    assert public.hex() == key


def test_every_kind_of_frame_and_element_type_is_on_the_page() -> None:
    kinds = re.findall(r"^\| ([A-Z]+) \| (\d+) \|", PROTOCOL, re.MULTILINE)
    assert {name: int(number) for name, number in kinds} == {kind.name: kind.value for kind in FrameKind}
    dtypes = re.findall(r"\| (\d+) \| ((?:bool|u?int|b?float)\d*)\b", PROTOCOL)
    assert {int(number): name for number, name in dtypes} == {
        number: str(dtype).removeprefix("torch.") for dtype, number in WIRE_DTYPES.items()
    }


@pytest.mark.parametrize("message", [control_pb2.CoordinatorMessage, control_pb2.ProviderMessage])
def test_every_control_message_is_on_the_page(message: Any) -> None:
    for field in message.DESCRIPTOR.fields:
        assert re.search(rf"^\| `{field.message_type.name}` \|", PROTOCOL, re.MULTILINE), field.message_type.name


def test_every_call_is_on_the_page() -> None:
    calls = re.findall(r"^//   ([A-Z]\w+) +\w", (ROOT / "proto/ravnest/v1/control.proto").read_text(), re.MULTILINE)
    assert len(calls) == 10
    for page in ("protocol.md", "architecture.md"):
        text = (ROOT / "docs" / page).read_text()
        for call in calls:
            assert re.search(rf"^\| `{call}` \|", text, re.MULTILINE), f"{page}: {call}"


_UNITS = {
    **{"": 1, "bytes": 1, "characters": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30},
    **{"s": 1, "min": 60, "day": 86400, "days": 86400},
}


def _limit(constant: str) -> float:
    """The constant `ravnest.CONSTANT`, in bytes or seconds."""
    value = _resolve(f"ravnest.{constant}")
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


def _resolve(dotted: str) -> Any:
    """The module, or the name in a module, that `ravnest.net.frame_limits.DEFAULT_LIMITS.frame_bytes` stands for."""
    first, *rest = dotted.split(".")
    value: Any = importlib.import_module(first)
    for name in rest:
        if isinstance(value, ModuleType) and not hasattr(value, name):
            value = importlib.import_module(f"{value.__name__}.{name}")
        else:
            value = getattr(value, name)
    return value


def _named_paths(text: str) -> set[str]:
    """The files and folders between single backticks, outside of code blocks."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", prose)
    return {span for span in spans if re.fullmatch(r"(?:[\w-]+/)*[\w-]+\.(?:py|md|proto|toml)|(?:[\w-]+/){2,}", span)}


def _exists(name: str) -> bool:
    """A path below the repository, the package or a large room of it; a bare file name may be in any folder."""
    if any((ROOT / place / name).exists() for place in ("", "ravnest", "ravnest/graph")):
        return True
    return "/" not in name and any(
        next((ROOT / place).rglob(name), None) for place in ("ravnest", "tests", "benchmarks", "proto")
    )


def _accuracy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(dim=1) == labels).float().mean()


def _blocks(text: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for kind, block in found if kind == language]


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is not dataclasses.MISSING:
        return f'"{field.default}"' if isinstance(field.default, str) else str(field.default)
    if field.default_factory is dataclasses.MISSING:
        return "required"
    return "{}" if field.default_factory is dict else f"{type(field.default_factory()).__name__}()"


def _options(command: str) -> set[str]:
    """The options that `ravnest COMMAND --help` shows in its first line."""
    subparsers = argparse.ArgumentParser().add_subparsers()
    importlib.import_module(f"ravnest.cli.{command}").add_parser(subparsers)
    return set(re.findall(r"--[a-z-]+", subparsers.choices[command].format_usage()))


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _without_size_names(graph: PortableGraph) -> Any:
    """The graph as plain data; how torch calls a free size differs from version to version."""
    return json.loads(re.sub(r'"s\d+"', '"size"', graph.to_json()))

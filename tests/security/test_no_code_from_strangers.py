"""Nothing that a peer can reach unpickles, evaluates, imports by name or starts a process."""

import ast
from pathlib import Path

import pytest

import ravnest
from tests.security.code_walker import Finding, findings, imported_names, modules_of, reachable

ROOMS = ["ravnest.net", "ravnest.graph", "ravnest.provider", "ravnest.engine"]

FOOTPRINT = "ravnest.provider.machine.torch_footprint"
STAND_IN = "imports torch's own compiler, by a name that is written there, when torch itself asks for it"
DOCTOR = "ravnest.provider.doctor.doctor"
VERSION = "reads which version of torch is installed, and runs nothing of it"
ITSELF = "CDLL(None) is the process itself: it loads nothing"
ALLOWED = {
    ("ravnest", "", "importlib.import_module"): "for the line below",
    ("ravnest", "__getattr__", "importlib.import_module"): "the package's public names come from a table in that file",
    ("ravnest.graph.ops", "resolve", "getattr(torch.ops.aten, …) with a name that is computed"): (
        "the name was looked up in the allow-list of operators on the line before"
    ),
    ("ravnest.graph.compiling", "Compiled.__init__", "torch.compile"): (
        "what it compiles is built of numbered values and operators of the allow-list: no text of a peer is in it"
    ),
    (FOOTPRINT, "", "importlib"): STAND_IN,
    (FOOTPRINT, "_NoCompiler.__getattr__", "importlib"): STAND_IN,
    (FOOTPRINT, "_NoCompiler.__getattr__", "importlib.import_module"): STAND_IN,
    (FOOTPRINT, "_NoCompiler.__getattr__", "getattr(torch._dynamo, …) with a name that is computed"): STAND_IN,
    (FOOTPRINT, "give_memory_back", "ctypes.CDLL"): ITSELF,
    (FOOTPRINT, "give_free_memory_back", "ctypes.CDLL"): ITSELF,
    (DOCTOR, "", "importlib.metadata"): VERSION,
    (DOCTOR, "look_at_torch", "importlib.metadata"): VERSION,
    (DOCTOR, "look_at_torch", "importlib.metadata.version"): VERSION,
    (DOCTOR, "look_at_torch", "importlib.metadata.PackageNotFoundError"): VERSION,
}
"""By module, function and finding: why this one place is no way in. What is found no more must go from here."""


def package_findings() -> tuple[set[str], list[Finding]]:
    modules = modules_of(Path(ravnest.__file__).parent)
    reached = reachable(modules, ROOMS)
    found = []
    for name in sorted(reached):
        found += findings(modules[name].read_text(), name, modules[name].name == "__init__.py")
    return reached, found


def test_nothing_a_peer_can_reach_runs_code_hidden_in_data() -> None:
    _, found = package_findings()
    surprises = [str(finding) for finding in found if (finding.module, finding.function, finding.what) not in ALLOWED]
    assert surprises == []


def test_every_exception_is_still_needed() -> None:
    _, found = package_findings()
    assert ALLOWED.keys() - {(finding.module, finding.function, finding.what) for finding in found} == set()


def test_the_walk_reaches_what_a_provider_runs_and_not_the_requesters_side() -> None:
    reached, _ = package_findings()
    assert {"ravnest.spec", "ravnest.errors", "ravnest.graph.ops", "ravnest.provider.agent"} <= reached
    assert {"ravnest.net.v1.frame_pb2", "ravnest.net.frames.frames", "ravnest.engine.stage"} <= reached
    # These do run the requester's Python, on the requester's machine.
    assert {"ravnest.jobfile", "ravnest.job", "ravnest.coordinator.launch.embedded"} & reached == set()


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "pickle"),
        ("import pickle as p\np.loads(x)", "pickle.loads"),
        ("from pickle import loads as harmless\nharmless(x)", "pickle.loads"),
        ("def f(x):\n    from marshal import loads\n    return loads(x)", "marshal.loads"),
        ("import dill, shelve", "shelve"),
        ("import torch\ntorch.load(x)", "torch.load"),
        ("import torch as t\nread = t.load\nread(x)", "torch.load"),
        ("from torch import load", "torch.load"),
        ("from torch import jit\njit.load(x)", "torch.jit.load"),
        ("import torch.export\ntorch.export.load(x)", "torch.export.load"),
        ("from torch import export as e\ne.load(x)", "torch.export.load"),
        ("import torch\nmap(torch.load, xs)", "torch.load"),
        ("import torch\ngetattr(torch, 'load')(x)", "torch.load"),
        ("import torch\nNAME = 'load'\ngetattr(torch, NAME)(x)", "torch.load"),
        ("import torch\ngetattr(torch, name)(x)", "getattr(torch, …) with a name that is computed"),
        ("import torch\nvars(torch)['load'](x)", "torch.load"),
        ("import torch\ntorch.__dict__['load'](x)", "torch.load"),
        ("import sys\nsys.modules['pickle'].loads(x)", "pickle.loads"),
        ("import sys\nsys.modules.get('pickle').loads(x)", "pickle.loads"),
        ("import numpy as np\nnp.load(x)", "numpy.load"),
        ("import numpy as np\nread(x, allow_pickle=True)", "allow_pickle"),
        ("read(x, weights_only=False)", "weights_only=False"),
        ("read(x, weights_only=flag)", "weights_only=False"),
        ("eval(x)", "eval"),
        ("run = exec\nrun(x)", "exec"),
        ("compile(x, '', 'exec')", "compile"),
        ("__import__(x)", "__import__"),
        ("import builtins\nbuiltins.eval(x)", "eval"),
        ("import builtins\ngetattr(builtins, 'exec')(x)", "exec"),
        ("from builtins import eval as sum", "eval"),
        ("__builtins__['eval'](x)", "__builtins__"),
        ("globals()['eval'](x)", "eval"),
        ("import importlib\nimportlib.import_module(x)", "importlib.import_module"),
        ("from importlib import import_module\nimport_module('pickle').loads(x)", "pickle.loads"),
        ("import os\nos.system(x)", "os.system"),
        ("from subprocess import run", "subprocess.run"),
        ("from operator import attrgetter\nattrgetter('load')(t)", "operator.attrgetter"),
        ("import ctypes\nctypes.CDLL(x)", "ctypes.CDLL"),
        ("from torch import *", "from torch import *, which cannot be followed"),
        ("class A:\n    async def f(self):\n        if (g := eval):\n            g(x)", "eval"),
        ("lambda x: eval(x)", "eval"),
        ("@decorated(eval)\ndef f(): pass", "eval"),
    ],
)
def test_the_walker_finds_it_under_any_name(source: str, what: str) -> None:
    assert what in {finding.what for finding in findings(source, "some.module")}


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.compile(x)",
        "model.eval()",
        "import torch\ntorch.ops.aten\ngetattr(torch, 'float32')",
        "import json\njson.load(x)",
        "getattr(scalar, which)",
        "read(x, allow_pickle=False, weights_only=True)",
        "'eval(x)'  # exec(x)",
        "from safetensors import safe_open",
        "class Switch:\n    def eval(self): return self.exec",
    ],
)
def test_the_walker_leaves_what_is_harmless(source: str) -> None:
    assert findings(source, "some.module") == []


def test_a_finding_names_its_place() -> None:
    (found,) = findings("class A:\n    def f(self):\n        return eval\n", "some.module")
    assert (found.line, found.function, str(found)) == (3, "A.f", "some.module:3 (A.f): eval")


def test_imports_are_followed_through_the_package(tmp_path: Path) -> None:
    files = {
        "__init__.py": "",
        "net/__init__.py": "",
        "net/wire.py": "def late():\n    from ..deep import well as w",
        "deep/__init__.py": "from . import side",
        "deep/side.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.typed\n",
        "deep/well.py": "import p.bottom",
        "bottom.py": "import pickle",
        "typed.py": "",
        "apart.py": "import p.net.wire",
    }
    for name, text in files.items():
        path = tmp_path / "p" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    modules = modules_of(tmp_path / "p")
    reached = reachable(modules, ["p.net"])
    assert reached == {"p", "p.net", "p.net.wire", "p.deep", "p.deep.side", "p.deep.well", "p.bottom"}
    assert [f.what for name in sorted(reached) for f in findings(modules[name].read_text(), name)] == ["pickle"]


@pytest.mark.parametrize(
    ("source", "is_package", "expected"),
    [
        ("from . import x", False, ["a.b.x"]),
        ("from . import x", True, ["a.b.c.x"]),
        ("from ..z import x", False, ["a.z.x"]),
        ("import q.r as s", False, ["q.r"]),
    ],
)
def test_relative_imports_are_resolved(source: str, is_package: bool, expected: list[str]) -> None:
    assert list(imported_names(ast.parse(source), "a.b.c", is_package)) == expected

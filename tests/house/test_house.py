"""The rules of the house find what breaks them, and nothing else."""

from pathlib import Path

import pytest

from tests.house import plain_english, reaches, repetition, rooms, sizes


def written(folder: Path, text: str, name: str = "module.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('"""Formed anew."""\n', "'anew': write again"),
        ("x = 1  # so\n# many\n", "'so many'"),
        ("most_bytes = 3\n", "begin it with max_"),
        ("_LEAST_SECONDS = 3\n", "begin it with min_"),
        ('"""What a stage keeps."""\n', "a sentence begins with 'What a stage keeps.'"),
        ('"""A cache. Where it is full, it ends."""\n', "a sentence begins with 'Where it is full, it'"),
        ('raise ValueError("nobody is there")\n', "'nobody'"),
    ],
)
def test_words_that_are_not_plain_are_found(tmp_path: Path, text: str, told: str) -> None:
    assert any(told in breach.text for breach in plain_english.breaches(written(tmp_path, text)))


@pytest.mark.parametrize(
    "text",
    [
        '"""Failure detector for providers. Is it late? What then?"""\n',
        "almost_bytes = 3  # the most bytes at least\n",
        '"""A canew, hencefort; the besides."""\n',
        'x = """Of what is in a string that is no docstring."""\n',
        'emit("nobody_takes")\n',
    ],
)
def test_plain_text_is_left_alone(tmp_path: Path, text: str) -> None:
    assert list(plain_english.breaches(written(tmp_path, text))) == []


def test_questions_and_code_on_a_page_are_left_alone(tmp_path: Path) -> None:
    page = written(tmp_path, "Where is it?\n\n```\nWhat this prints.\n```\n", "page.md")
    assert list(plain_english.breaches(page)) == []


def test_a_large_function_needs_a_reason(tmp_path: Path) -> None:
    body = "def long():\n" + "    x = 1\n" * 60
    path = written(tmp_path, body)
    assert [breach.text for breach in sizes.breaches(tmp_path)] == ["long has 61 lines; 60 at most"]
    path.write_text("# Large: a table of every case, one line each.\n" + body)
    assert list(sizes.breaches(tmp_path)) == []


def test_a_class_name_stands_once(tmp_path: Path) -> None:
    written(tmp_path, "class Line: ...\n", "a.py")
    written(tmp_path, "class Line: ...\n", "b.py")
    assert ["class Line stands in" in breach.text for breach in sizes.breaches(tmp_path)] == [True]


def test_a_room_of_too_many_modules_is_named(tmp_path: Path) -> None:
    for number in range(sizes.MAX_MODULES + 1):
        written(tmp_path, "", f"m{number}.py")
    assert [breach.text for breach in sizes.breaches(tmp_path)] == ["21 modules; 20 at most"]


def test_a_run_in_the_same_shape_is_found_under_other_names(tmp_path: Path) -> None:
    lines = ["a = b", "a(b)", "a[b] = c", "if a: b()", "a += 1", "return_ = a.b", "a, b = c"] * 2
    written(tmp_path, "\n".join(lines), "a.py")
    written(tmp_path, "\n".join(lines).replace("b", "z").replace("c", "y"), "b.py")
    assert any("a.py:1" in breach.text for breach in repetition.breaches(tmp_path))


def test_fields_in_a_row_are_no_repetition(tmp_path: Path) -> None:
    fields = "\n".join(f"field{number}: int" for number in range(20))
    written(tmp_path, fields, "a.py")
    written(tmp_path, fields, "b.py")
    assert list(repetition.breaches(tmp_path)) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("swarm._processes.pids\n", "'swarm._processes'"),
        ("import ravnest.job\nravnest.job._made\n", "'ravnest.job._made'"),
        ("from ravnest.job import _made\n", "the private name '_made'"),
        ("from ravnest import job\njob.Job()._made\n", "'job.Job()._made'"),
        ('monkeypatch.setattr(outbox, "_MAX_BYTES", 3)\n', "'_MAX_BYTES' by its text"),
        ('patch.setattr("ravnest.net.wire._MAX_BYTES", 3)\n', "'ravnest.net.wire._MAX_BYTES' by its text"),
        ("from tests.net.test_address import ends\n", "the test module 'tests.net.test_address'"),
        ("from tests.net import test_address\nimport tests.net.test_address\n", "the test module 'tests.net.test_"),
    ],
)
def test_reaches_into_private_names_are_found(tmp_path: Path, text: str, told: str) -> None:
    assert any(told in breach.text for breach in reaches.breaches(written(tmp_path, text)))


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def f(self):\n        return self._a + super()._b\n",
        "import torch\nimport torch.nn.functional as F\ntorch.ops.aten._softmax(F._x)\n",
        "from unittest import mock\nmock._x\n",
        "point._replace(x=1).__class__\n",
        'monkeypatch.setattr(outbox, "MAX_BYTES", 3)\nmonkeypatch.setenv("_X", "1")\n',
        "from tests.net.ends import a_stream\n",
    ],
)
def test_public_names_and_those_of_other_libraries_may_be_used(tmp_path: Path, text: str) -> None:
    assert list(reaches.breaches(written(tmp_path, text))) == []


def test_a_module_that_stands_directly_in_a_divided_room_is_named(tmp_path: Path) -> None:
    (tmp_path / "coordinator" / "feed").mkdir(parents=True)
    for name in ("coordinator.py", "intake.py", "__init__.py", "helpers.py", "feed/ledger.py"):
        written(tmp_path, "", f"coordinator/{name}")
    [breach] = rooms.breaches(tmp_path)
    assert breach.path.name == "helpers.py"

"""The line of a value is found however the text is written."""

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ravnest.preview.toml_lines import Lines

TEXT = '''# machines
title = "a # no comment"  # one
[requester]
up_mbps = 40
[[node]]
name = "anna"
notes = """
[[node]]
name = "not this one"
"""
memory = "8GB"

[[node]] # the second
"name" = 'ben'
links = [ 1,
  2, # two
  { to = "x", rate = 3 },
]
[node.extra]
deep.er = 1
[[node.child]]
a = 1
[[node.child]]
a = 2
[[node]]
inline = { a = 1, "b" = [ 4 ], c = {} }
'''

PLACES = [
    (("title",), 2),
    (("requester",), 3),
    (("requester", "up_mbps"), 4),
    (("node",), 5),
    (("node", 0), 5),
    (("node", 0, "name"), 6),
    (("node", 0, "notes"), 7),
    (("node", 0, "memory"), 11),
    (("node", 1), 13),
    (("node", 1, "name"), 14),
    (("node", 1, "links"), 15),
    (("node", 1, "links", 0), 15),
    (("node", 1, "links", 1), 16),
    (("node", 1, "links", 2), 17),
    (("node", 1, "links", 2, "rate"), 17),
    (("node", 1, "extra", "deep", "er"), 20),
    (("node", 1, "child", 0, "a"), 22),
    (("node", 1, "child", 1, "a"), 24),
    (("node", 2), 25),
    (("node", 2, "inline", "b", 0), 26),
]


@pytest.mark.parametrize(("path", "line"), PLACES, ids=[".".join(map(str, path)) for path, _ in PLACES])
def test_every_value_is_found_in_its_line(path: tuple[str | int, ...], line: int) -> None:
    tomllib.loads(TEXT)
    assert Lines(TEXT).of(path) == line


def test_what_is_missing_is_told_at_the_table_it_is_missing_in() -> None:
    assert Lines(TEXT).of(("node", 1, "memory")) == 13
    assert Lines(TEXT).of(("nobody",)) == 1
    assert Lines("").of(()) == 1


@settings(max_examples=150, derandomize=True, database=None)
@given(
    tables=st.lists(
        st.dictionaries(
            st.sampled_from(["name", "memory", "speed", '"a b"', "'x.y'"]),
            st.sampled_from(["1", '"t"', "'''\n[x]\n'''", '"""\na = 1\n"""', "[1,\n2]", "{ a = 1 }", "[]", "true # c"]),
        ),
        max_size=6,
    ),
    comments=st.sampled_from(["", "# [[node]]\n", "\n\n", '# "\n']),
)
def test_the_lines_of_any_tables_are_those_they_were_written_in(tables: list[dict[str, str]], comments: str) -> None:
    text, expected = comments, {}
    for number, table in enumerate(tables):
        expected["node", number] = text.count("\n") + 1
        text += "[[node]]\n" + comments
        for key, value in table.items():
            expected["node", number, key.strip("\"'")] = text.count("\n") + 1
            text += f"{key} = {value}\n{comments}"
    read: dict[str, Any] = tomllib.loads(text)
    assert len(read.get("node", [])) == len(tables)
    found = Lines(text)
    assert {path: found.of(path) for path in expected} == expected

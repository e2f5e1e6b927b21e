"""JSON from elsewhere is plain values within bounds, or a ValueError in a few words."""

import json

import pytest

from ravnest.errors import SENTENCE_CHARACTERS, PeerError
from ravnest.safe_json import read_json


@pytest.mark.parametrize("value", [None, True, 0, -(2**70), 0.5, "", "é", "😀", [], {}, [[1, {"a": [None]}]]])
def test_plain_values_are_read(value: object) -> None:
    assert read_json(json.dumps(value)) == value
    assert read_json(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Expecting value"),
        ("[1,]", "Expecting value|Illegal trailing comma"),
        (b"\xff", "utf-8"),
        ("NaN", "it holds NaN, which is not a finite number"),
        ("-Infinity", "not a finite number"),
        ("1e999", "it holds 1e999, which is not a finite number"),
        ("[" * 100_000, "nested too deep|more than"),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, "nested too deep"),
        ("9" * 10_000, "digits"),
        ('"\\ud800"', "surrogates not allowed"),
        ('{"\\udfff": 1}', "surrogates not allowed"),
        ("[" + "[]," * 60_000 + "[]]", "it holds more than 100000 values"),
    ],
)
def test_anything_else_is_refused_in_a_few_words(text: str | bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        read_json(text)
    assert len(str(refused.value)) < 300


def test_how_many_values_may_come_is_the_callers_to_say() -> None:
    assert read_json("[1, 2]", max_values=2) == [1, 2]
    with pytest.raises(ValueError, match="it holds more than 2 values"):
        read_json("[1, 2, 3]", max_values=2)


def test_what_an_error_quotes_can_neither_steer_a_terminal_nor_flood_it() -> None:
    assert str(PeerError("anna says \x1b[2J\r\nhello \ud800 …")) == "anna says  [2J  hello   …"
    long = str(PeerError("the name " + "x" * 100_000 + " is not known"))
    assert len(long) <= SENTENCE_CHARACTERS
    assert long.startswith("the name x") and long.endswith("x is not known")

"""Regression tests for inputs found by fuzzing, each of which once raised another exception than a RavnestError."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.fuzz.targets import judge, named

Change = Callable[[Any], Any]


def changed(target: str, change: Change) -> bytes:
    """The target's first valid input with the JSON in it changed."""
    value = json.loads(named(target).seeds()[0])
    change(value)
    return json.dumps(value).encode()


def put(*path: str | int, value: Any) -> Change:
    def change(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        data[path[-1]] = value

    return change


def drop(*path: str | int) -> Change:
    def change(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        del data[path[-1]]

    return change


DEEP: Any = json.loads("[" * 900 + "]" * 900)


@pytest.mark.parametrize(
    ("target", "change", "says"),
    [
        ("settings", put("clip_norm", value=float("inf")), "which is not a finite number"),
        ("settings", put("optimizer", value='{"name": "\\u001b[2J", "arguments": {}}'), " .2J is not in torch.optim"),
        ("optimizer", put("name", value="x" * 9000), "is not in torch.optim"),
        ("optimizer", put("arguments", "lr", value="x" * 9000), "argument 'lr' is not a plain value"),
        ("optimizer", put("name", value="\ud800"), "is not JSON"),
        ("optimizer", put("arguments", "lr", value=[0] * 5000), "is refused by torch"),
        ("graph", put("version", value="x" * 9000), "has format version"),
        ("graph", put("parameters", 0, "dtype", value="x" * 9000), "is not a tensor type"),
        ("summary", put("samples", value="many"), "samples is 'many'"),
        ("summary", put("status", value=[]), "status is"),
        ("summary", put("seconds", value=10**400), "seconds is"),
        ("summary", put("eval", value={"loss": {}}), "eval is"),
        ("summary", put("clusters", 0, "stages", 0, "provider", value=3), "provider is '3'"),
        ("checkpoint_manifest", put("ledger", value={}), "is damaged: its ledger"),
        ("checkpoint_manifest", put("ledger", "completed", value="x"), "is damaged: its ledger"),
        ("checkpoint_manifest", put("ledger", "completed", value=1e300), "is damaged: its ledger"),
        ("checkpoint_manifest", put("state", "optimizer", value=3), "damaged"),
        ("checkpoint_manifest", drop("state", "schedule"), "damaged"),
    ],
)
def test_a_changed_value_is_refused(target: str, change: Change, says: str) -> None:
    error = judge(named(target), changed(target, change))
    assert error is not None
    assert says.strip(" .") in str(error)


@pytest.mark.parametrize(
    "change",
    [
        put("ledger", value=[]),
        put("parts", value=[]),
        drop("parts", 0, "size"),
        drop("parts", 0, "sha256"),
        put("parts", 0, "file", value="../part-0.safetensors"),
        put("parts", 0, "file", value="part-\u0663.safetensors"),
        put("updates", value=-1),
        put("state", value=DEEP),
    ],
)
def test_a_damaged_manifest_is_passed_over(change: Change) -> None:
    assert judge(named("checkpoint_manifest"), changed("checkpoint_manifest", change)) is None


@pytest.mark.parametrize(
    "line",
    [b'{"at": 1e300}\n', b'{"at": 99999999999999999999}\n', b'{"at": NaN}\n', b"[" * 100_000 + b"\n"],
)
def test_an_event_with_an_impossible_time_is_shown_or_left_out(line: bytes) -> None:
    assert judge(named("events"), line) is None


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (0, "1e400"),
        (0, "-1"),
        (0, "true"),
        (1, '{"groups": 3, "values": {}}'),
        (1, '{"groups": [3], "values": {}}'),
        (1, '{"groups": [{}, {}], "values": {}}'),
        (1, '{"groups": [{}], "values": 3}'),
        (2, "3"),
        (2, '["x"]'),
        (2, "[" * 100_000),
    ],
)
def test_a_stage_refuses_a_state_of_another_form(place: int, text: str) -> None:
    lines = named("restore").seeds()[0].split(b"\n")
    lines[place] = text.encode()
    error = judge(named("restore"), b"\n".join(lines))
    assert error is not None and "the saved state of a stage cannot be read" in str(error)


@pytest.mark.parametrize("text", [b"not base64", b"\xff", b"A"])
def test_a_damaged_state_of_the_datas_order_is_refused(text: bytes) -> None:
    error = judge(named("data_state"), text)
    assert error is not None and "the data's order cannot be used" in str(error)


def test_a_key_file_with_an_unknown_curve_is_damaged() -> None:
    # The object identifier of P-256, changed into an unknown one.
    pem = named("authority_file").seeds()[0]
    header, body, rest = pem[:28], pem[28:], b""
    changed_keys = [header + body.replace(a, b, 1) + rest for a, b in ((b"qGSM49", b"qGSM4x"), (b"qGSM49", b"qGSN49"))]
    errors = [judge(named("authority_file"), key) for key in changed_keys if key != pem]
    assert errors and all(error is not None and "is damaged" in str(error) for error in errors)


def test_a_report_that_is_not_finite_does_not_break_the_summary() -> None:
    assert judge(named("report"), named("report").seeds()[1]) is None

"""Mutations of valid inputs: of single bytes, of the values in a JSON text, and of the header of a safetensors file.

Mutations of bytes rarely pass the first check of a decoder; those that keep the form reach the later checks.
"""

import json
from random import Random
from typing import Any

_NUMBERS = (0, 1, -1, 2, 63, 255, 1000, 2**31, -(2**31), 2**32, 2**40, 2**53, 2**63 - 1, -(2**63), 2**64, 10**400)
_REALS = (0.5, -0.0, 1e308, 1e-320, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "x", "é", "\u0663", "\ud800", "a\0b", "\x1b[2J", "two\nlines", "a" * 300, "a" * 5000, "inf")
_PATHS = ("../../etc/passwd", "..", "/etc/passwd", "a/../b", "C:\\x")
_NAMES = ("__class__", "__import__", "os.system", "params", "float32", "cuda:0", "LambdaLR", "LBFGS", "SGD", "StepLR")
_OPERATORS = ("aten.from_file.default", "aten.add.out", "aten.as_strided.default", "aten.linear.default", "py.getitem")
_LISTS: tuple[Any, ...] = ([], {}, [[]], [[[[[[[[[[1]]]]]]]]]], [0] * 100, {"": None})
_ARGUMENTS: tuple[Any, ...] = ({"ref": "w"}, {"ref": "../x"}, {"ref": {}}, {"device": "cuda:0"}, {"dtype": "object"})
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, *_NUMBERS, *_REALS, *_TEXTS, *_PATHS),
    *(*_NAMES, *_OPERATORS, *_LISTS, *_ARGUMENTS),
)
ODD_BYTES = (b"", b"\0", b"\xff", b"\x80", b"\xff" * 8, bytes(8), *(bytes([c]) for c in b'[{"\\\n-=#:.'), b"RVN\x01")


def mutate(data: bytes, random: Random, is_json: bool = False) -> bytes:
    """An input similar to this one."""
    for _ in range(random.choice((1, 1, 2, 4))):
        changed: bytes | None = None
        if is_json or random.random() < 0.6:
            changed = _changed_lines(data, random) if random.random() < 0.8 else None
            changed = changed if changed is not None else _changed_safetensors(data, random)
        data = changed if changed is not None else _changed_bytes(data, random)
    return data


def _changed_bytes(data: bytes, random: Random) -> bytes:
    start = random.randint(0, len(data))
    end = min(len(data), start + random.choice((0, 1, 1, 2, 4, 8, 50)))
    kind = random.randrange(6)
    if kind == 0:
        return data[:start]
    if kind == 1:
        return data[:start] + data[end:]
    if kind == 2:
        return data[:end] + data[start:end] * random.choice((1, 2, 30)) + data[end:]
    if kind == 3:
        return data[:start] + random.choice(ODD_BYTES) + data[end:]
    if kind == 4 and start < len(data):
        return data[:start] + bytes([data[start] ^ 1 << random.randrange(8)]) + data[start + 1 :]
    return data[:start] + random.randbytes(random.choice((1, 2, 8))) + data[end:]


def _changed_lines(data: bytes, random: Random) -> bytes | None:
    """The same input with one line of JSON changed; None if that line is not JSON."""
    lines = data.split(b"\n")
    place = random.randrange(len(lines))
    changed = _changed_json(lines[place], random)
    return None if changed is None else b"\n".join([*lines[:place], changed, *lines[place + 1 :]])


def _changed_json(text: bytes, random: Random) -> bytes | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return json.dumps(_changed_value(value, random), separators=(",", ":")).encode()


def _changed_value(value: Any, random: Random) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        kind = random.randrange(10)
        if kind == 0:
            return {k: v for k, v in value.items() if k != key}
        if kind == 1:
            return {**value, str(random.choice(ODD_VALUES)): value[key]}
        if kind == 2:
            return {(str(random.choice(ODD_VALUES)) if k == key else k): v for k, v in value.items()}
        return {**value, key: _changed_value(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.9:
        place = random.randrange(len(value))
        kind = random.randrange(10)
        if kind == 0:
            return value[:place] + value[place + 1 :]
        if kind == 1:
            return value[:place] + [value[place]] * random.choice((2, 70)) + value[place + 1 :]
        if kind == 2:
            return [*value[:place], random.choice(ODD_VALUES), *value[place:]]
        return [*value[:place], _changed_value(value[place], random), *value[place + 1 :]]
    if isinstance(value, str) and random.random() < 0.7:
        inner = _changed_json(value.encode(errors="replace"), random) if value[:1] in ("{", "[") else None
        if inner is not None:
            return inner.decode()
    return random.choice(ODD_VALUES)


def _changed_safetensors(data: bytes, random: Random) -> bytes | None:
    """The same input with a changed header of correct length; None if it is not a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 10 or size > len(data) - 8:
        return None
    header = _changed_json(data[8 : 8 + size], random)
    return None if header is None else len(header).to_bytes(8, "little") + header + data[8 + size :]

"""Rule of all fuzzing: any bytes give a value, or a RavnestError whose message is one printable sentence."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ravnest.errors import RavnestError

MAX_CHARACTERS = 1500
"""Maximum length of an error message; a longer one would repeat data of the peer."""


@dataclass(frozen=True)
class Target:
    """One decoder. `seeds` are valid inputs, from which mutations start."""

    name: str
    decode: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    is_json: bool = False


def judge(target: Target, data: bytes) -> RavnestError | None:
    """None if the bytes were read, or the error if they were refused. Any other exception is a bug and is raised."""
    try:
        target.decode(data)
    except RavnestError as error:
        sentence = str(error)
        assert sentence and sentence.isprintable(), f"not one printable sentence: {sentence!r}"
        assert len(sentence) <= MAX_CHARACTERS, f"a sentence of {len(sentence)} characters: {sentence[:200]!r}"
        return error
    return None


def bombs() -> Iterator[tuple[str, bytes]]:
    """Small inputs that demand large resources: depth, size, digits, counts."""
    deep = 100_000
    yield "nested lists", b"[" * deep + b"]" * deep
    yield "nested objects", b'{"a":' * deep + b"1" + b"}" * deep
    yield "open lists", b"[" * deep
    yield "digits", b"9" * deep
    yield "exponent", b"1e999999999"
    yield "empty lists", b"[" + b"[]," * deep + b"[]]"
    yield "numbers that are none", b"[NaN, Infinity, -Infinity]"
    yield "half a character", b'"\\ud800"'
    yield "steers a terminal", b'"\\u001b[2J"'
    yield "a pickle", b"cos\nsystem\n(S'true'\ntR."
    yield "zeros", bytes(deep)
    yield "ones", b"\xff" * deep

"""JSON reader for untrusted text, from a peer or a file: plain values within bounds, or a ValueError with a short
reason.

The standard reader accepts NaN, lone surrogates, and any amount of memory and nesting.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any, Final, NoReturn, get_args, get_type_hints

MAX_VALUES: Final = 100_000
"""Default limit of values in a text; each takes some fifty bytes of memory or more."""

_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(
    text: str | bytes,
    max_values: int = MAX_VALUES,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Parses `text`; raises ValueError, with a short reason, for anything that is not one JSON value in UTF-8.

    All numbers are finite, and all strings can be encoded as UTF-8. A text with more than `max_values` values, or
    nested so deep that parsing it would exhaust the stack, is refused.
    """
    plain = text.decode() if isinstance(text, bytes) else text
    # Every value but the first follows one of these characters. Counting those inside strings too is harmless.
    if plain.count(",") + plain.count("[") + plain.count("{") > max_values:
        raise ValueError(f"it holds more than {max_values} values")
    try:
        value = json.loads(plain, parse_constant=_not_finite, parse_float=_finite, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except MemoryError:
        raise ValueError("it does not fit into memory") from None
    if _SURROGATE.search(plain):
        # Two surrogates may form a valid pair; encoding fails for a lone one.
        json.dumps(value, ensure_ascii=False).encode()
    return value


def read_fields(kind: type, text: str) -> dict[str, Any]:
    """Parses an object with the fields of this dataclass of plain values, each of its type; ValueError for anything
    else, as the end of a sentence about them."""
    try:
        data = read_json(text)
    except ValueError as error:
        raise ValueError(f"are not valid JSON: {error}") from None
    types = get_type_hints(kind)
    if not isinstance(data, dict) or data.keys() != types.keys():
        raise ValueError("do not have the fields that this version knows; update the older machine")
    for name, value in data.items():
        allowed = get_args(types[name]) or (types[name],)
        # JSON has one kind of number, and a bool is an int for Python.
        allowed = (*allowed, int) if float in allowed else allowed
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise ValueError(f"have {str(value)[:80]!r} as {name}, which has the wrong type")
    return data


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _not_finite(text[:40])


def _not_finite(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is not a finite number")

"""JSON from elsewhere: plain values with bounds, or a ValueError in a few words. For texts that a peer or a file gives.

The standard reader takes NaN for a number, half a character for text, and whatever memory and depth the text asks for.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any, Final, NoReturn

MAX_VALUES: Final = 100_000
"""How many values a text may hold where nothing else is said: each takes some fifty bytes of memory or more."""

_HALF_A_CHARACTER: Final = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(
    text: str | bytes,
    max_values: int = MAX_VALUES,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """The value that `text` holds; ValueError, with a short reason, for anything that is not one JSON value in UTF-8.

    Numbers are finite and texts can be sent and printed as UTF-8. A text with more than `max_values` values, or so
    nested that reading it would exhaust the stack, is refused.
    """
    plain = text.decode() if isinstance(text, bytes) else text
    # Every value but the first follows one of these; those inside of strings are counted too, which does no harm.
    if plain.count(",") + plain.count("[") + plain.count("{") > max_values:
        raise ValueError(f"it holds more than {max_values} values")
    try:
        value = json.loads(plain, parse_constant=_not_finite, parse_float=_finite, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except MemoryError:
        raise ValueError("it does not fit into memory") from None
    if _HALF_A_CHARACTER.search(plain):
        # Two halves may be one whole character: only writing it out tells.
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _not_finite(text[:40])


def _not_finite(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is not a finite number")

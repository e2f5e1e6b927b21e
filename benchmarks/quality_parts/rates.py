"""Samples/s of pipelines over real links, from the output file of `python -m benchmarks.pipeline --json FILE`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ravnest.errors import RunError

_LINE: Final = "100/50"


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of Ravnest and 1F1B, in the same units."""

    ours: float
    one_f_one_b: float


def read_rates(path: Path, stages: int) -> Rates:
    """The rates of the GPT with this many stages at 100 Mbit/s and 50 ms, Ravnest with float32 on the links; RunError
    if the file does not have them."""
    case = f"gpt {stages} {_LINE}"
    try:
        rows = {row["case"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
        return Rates(float(rows[case]["float32"]), float(rows[case]["1f1b"]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(
            f"{path} has no rates of {case!r} ({type(error).__name__}: {error}); "
            f"write it with python -m benchmarks.pipeline --only gpt,{stages},{_LINE} --json FILE"
        ) from None

"""How the figures of a machine and of its connection read to a person: the same at the provider and the coordinator."""

import re
from typing import Final

_UNITS: Final = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}


def gibibytes(value_bytes: float) -> str:
    """12884901888 as "12.0 GiB", and what is small in MiB."""
    if value_bytes < 1 << 30:
        return f"{value_bytes / (1 << 20):.0f} MiB"
    gibi = value_bytes / (1 << 30)
    return f"{gibi:.1f} GiB" if gibi < 100 else f"{gibi:.0f} GiB"


def size_bytes(text: str) -> int | None:
    """Bytes in `8GB`, `512MiB`, `1.5G` or a plain number; None for anything else, and for less than one byte."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    unit = _UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    return size if size >= 1 else None


def flops(per_second: float) -> str:
    """95e9 as "95 GFLOP/s", 41.3e12 as "41.3 TFLOP/s"."""
    return f"{_three_digits(per_second / 1e9)} GFLOP/s" if per_second < 1e12 else f"{per_second / 1e12:.3g} TFLOP/s"


def milliseconds(seconds: float) -> str:
    """0.0243 as "24 ms", 0.0004 as "0.4 ms"."""
    return f"{seconds * 1000:.1f} ms" if seconds < 0.00995 else f"{seconds * 1000:.0f} ms"


def megabits(bytes_per_second: float) -> str:
    """11.5e6 bytes per second as "92"."""
    return _three_digits(bytes_per_second * 8 / 1e6)


def sample_rate(per_second: float) -> str:
    """18313.2 as "18,313", 64.04 as "64": a rate of samples with three digits that matter, unless it has more."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def counted(number: int, word: str, several: str = "") -> str:
    """ "1 core", "8 cores"; `several` where that takes more than an s."""
    return f"{number} {word}" if number == 1 else f"{number} {several or word + 's'}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"

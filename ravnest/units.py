"""Text forms of numbers: sizes, rates, durations and counts, the same in every message, table and page."""

import math
import re
from collections.abc import Mapping
from typing import Final

_SIZE_UNITS: Final = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1000), ("B", 1000), ("IB", 1024))
}


def byte_size(value_bytes: float) -> str:
    """1234567890 as "1.15 GiB", 512 as "512 B"."""
    return (
        f"{round(value_bytes)} B"
        if value_bytes < 1000
        else _scaled(value_bytes, 1024, (" KiB", " MiB", " GiB", " TiB"))
    )


def decimal_size(value_bytes: float) -> str:
    """3145728 as "3.15 MB", 512 as "512 B": in powers of 1000, like the rates of lines."""
    return f"{round(value_bytes)} B" if value_bytes < 1000 else _scaled(value_bytes, 1000, (" kB", " MB", " GB", " TB"))


def parse_byte_size(text: str) -> int | None:
    """Bytes in `8GB`, `512MiB`, `1.5G` or a plain number; None for anything else, and for less than one byte."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    unit = _SIZE_UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    return size if size >= 1 else None


def parse_byte_rate(text: str) -> float | None:
    """Bytes per second in `2MB/s`, `500KiB/s` or `16Mbit/s`; None for anything else."""
    bits = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMG]?)bit/s", text.strip(), re.ASCII | re.IGNORECASE)
    if bits:
        rate = float(bits[1]) * _SIZE_UNITS[bits[2].upper()] / 8
        return rate if rate > 0 else None
    size, slash, per = text.strip().rpartition("/")
    return None if not slash or per != "s" else parse_byte_size(size)


def flops(per_second: float) -> str:
    """95e9 as "95 GFLOP/s", 41.3e12 as "41.3 TFLOP/s"."""
    return f"{_two_digits(per_second / 1e9)} GFLOP/s" if per_second < 1e12 else f"{per_second / 1e12:.3g} TFLOP/s"


def milliseconds(seconds: float) -> str:
    """0.0243 as "24 ms", 0.0004 as "0.4 ms"."""
    return f"{seconds * 1000:.1f} ms" if seconds < 0.00995 else f"{seconds * 1000:.0f} ms"


def duration(seconds: float) -> str:
    """8.4 as "8.4 s", 83 as "1:23", 7283 as "2:01:23"."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def megabits(bytes_per_second: float) -> str:
    """11.5e6 bytes per second as "92"."""
    return _two_digits(bytes_per_second * 8 / 1e6)


def sample_rate(per_second: float) -> str:
    """18313.2 as "18,313", 64.04 as "64": three significant digits, or all digits before the decimal point."""
    return count(per_second) if per_second >= 100 else f"{per_second:.3g}"


def count(value: float) -> str:
    """1234567 as "1,234,567"."""
    return f"{round(value):,}" if math.isfinite(value) else str(value)


def short_count(value: int) -> str:
    """1234567 as "1.23M"."""
    return str(value) if value < 1000 else _scaled(value, 1000, ("k", "M", "G", "T"))


def counted(number: int, noun: str, plural: str = "") -> str:
    """ "1 core", "8 cores"; `plural` if it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def metric(value: float | None) -> str:
    """A loss or a metric: "0.9472", "2.3e-05", "nan"."""
    if value is None or not math.isfinite(value):
        return "nan"
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.3g}"


def metrics(values: Mapping[str, float | None]) -> str:
    """ "loss 0.1234   accuracy 0.9472": the loss first, then the others in the given order."""
    names = sorted(values, key=lambda name: name != "loss")
    return "   ".join(f"{name} {metric(values[name])}" for name in names)


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    """Three significant digits in the smallest unit that needs no more than three before the decimal point."""
    scaled = value / step
    for unit in units[:-1]:
        if scaled < 999.5:
            return f"{scaled:.3g}{unit}"
        scaled /= step
    return f"{scaled:.3g}{units[-1]}"

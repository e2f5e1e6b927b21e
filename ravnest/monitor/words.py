"""How numbers read to a person: the same in the display, the plain log and `ravnest status`."""

import math
from collections.abc import Mapping


def count(value: float) -> str:
    """1234567 as "1,234,567"."""
    return f"{round(value):,}" if math.isfinite(value) else str(value)


def short_count(value: int) -> str:
    """1234567 as "1.23M"."""
    return str(value) if value < 1000 else _scaled(value, 1000, ("k", "M", "G", "T"))


def size(value_bytes: float) -> str:
    """1234567890 as "1.15 GiB"."""
    return f"{round(value_bytes)} B" if value_bytes < 1000 else _scaled(value_bytes, 1024, _BYTE_UNITS)


def duration(seconds: float) -> str:
    """How long something takes: "8.4 s", "1:23" or "2:01:23"."""
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def rate(samples_per_second: float) -> str:
    """Samples per second with three digits that matter, unless they are more than that."""
    if samples_per_second >= 100:
        return count(samples_per_second)
    return f"{samples_per_second:.3g}"


def measure(value: float | None) -> str:
    """A loss or a metric: "0.9472", "2.3e-05", "nan"."""
    if value is None or not math.isfinite(value):
        return "nan"
    return f"{value:.4f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.3g}"


def measures(values: Mapping[str, float | None]) -> str:
    """ "loss 0.1234   accuracy 0.9472": the loss first, then as they come."""
    names = sorted(values, key=lambda name: name != "loss")
    return "   ".join(f"{name} {measure(values[name])}" for name in names)


_BYTE_UNITS = (" KiB", " MiB", " GiB", " TiB")


def _scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    scaled = value / step
    for unit in units:
        if scaled < 999.5 or unit == units[-1]:
            return f"{scaled:.3g}{unit}"
        scaled /= step
    raise AssertionError("the last unit takes what is left")

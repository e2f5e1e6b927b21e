"""Report of a chaos run: the outcome of each case, the rates and the broken promises."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True)
class Outcome:
    """Outcome of one case; times are since its injection, None: it never happened."""

    number: int
    case: str
    machines: tuple[str, ...]
    seen_seconds: float | None = None
    """Time until all expected events were reported."""
    continued_seconds: float | None = None
    """Time until microbatches were completed again; 0 if there was no pause."""
    back_seconds: float | None = None
    """Time from its healing until the events reported the machines to be back."""
    violations: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    seed: int
    outcomes: tuple[Outcome, ...]
    undisturbed_rate: float
    """Microbatches per second before the first fault."""
    disturbed_rate: float
    """The same from the first fault until the end of the last."""
    ledger: Mapping[str, int] = field(default_factory=dict)
    losses: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """By samples: the loss of an evaluation, and that of the run without faults."""
    ends: tuple[str, ...] = ()
    """Violations at the end, or of the run as a whole."""

    @property
    def violations(self) -> list[str]:
        """Every broken promise, with its case."""
        return [f"{each.number}. {each.case}: {why}" for each in self.outcomes for why in each.violations] + list(
            self.ends
        )

    @property
    def kept_rate(self) -> float:
        """Share of the undisturbed rate that remained."""
        return self.disturbed_rate / self.undisturbed_rate if self.undisturbed_rate else 0.0

    def __str__(self) -> str:
        rows = [("", "case", "machines", "seen s", "continued s", "back s", "")]
        for each in self.outcomes:
            times = (_seconds(each.seen_seconds), _seconds(each.continued_seconds), _seconds(each.back_seconds))
            rows.append((str(each.number), each.case, " ".join(each.machines), *times, "; ".join(each.violations)))
        pauses = [each.continued_seconds for each in self.outcomes if each.continued_seconds is not None]
        lines = [*_table(rows), f"seed {self.seed}, {len(self.outcomes)} cases"]
        if pauses:
            lines.append(f"until training continued: median {median(pauses):.1f} s, longest {max(pauses):.1f} s")
        lines.append(
            f"{self.disturbed_rate:.1f} microbatches/s, undisturbed {self.undisturbed_rate:.1f}: {self.kept_rate:.2f}"
        )
        if self.ledger:
            lines.append("ledger: " + ", ".join(f"{name} {count}" for name, count in self.ledger.items()))
        for samples, (loss, without) in self.losses.items():
            lines.append(f"evaluation after {samples:,} samples: loss {loss:.4f}, without faults {without:.4f}")
        lines += [f"VIOLATION: {each}" for each in self.violations] or ["no promise was broken"]
        return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

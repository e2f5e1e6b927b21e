"""What became of a run that was disturbed on purpose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True)
class Outcome:
    """One case of the schedule, and how the swarm took it; times are since it was injected, None: it never came."""

    number: int
    case: str
    machines: tuple[str, ...]
    seen_seconds: float | None = None
    """Until everything that must be told of it was told."""
    went_on_seconds: float | None = None
    """Until microbatches were completed again; 0 where they never ceased to be."""
    back_seconds: float | None = None
    """From its healing until the machines were told to be back."""
    violations: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    seed: int
    outcomes: tuple[Outcome, ...]
    undisturbed_rate: float
    """Microbatches per second before the first fault."""
    disturbed_rate: float
    """The same from the first fault until the last was over."""
    ledger: Mapping[str, int] = field(default_factory=dict)
    losses: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """By samples: the loss of an evaluation, and what it was in the run without faults."""
    ends: tuple[str, ...] = ()
    """What was wrong at the end, or with the run as a whole."""

    @property
    def violations(self) -> list[str]:
        """Every promise that was not kept; each names its case."""
        return [f"{each.number}. {each.case}: {why}" for each in self.outcomes for why in each.violations] + list(
            self.ends
        )

    @property
    def kept_rate(self) -> float:
        """The share of the undisturbed rate that was left."""
        return self.disturbed_rate / self.undisturbed_rate if self.undisturbed_rate else 0.0

    def __str__(self) -> str:
        rows = [("", "case", "machines", "told s", "went on s", "back s", "")]
        for each in self.outcomes:
            times = (_seconds(each.seen_seconds), _seconds(each.went_on_seconds), _seconds(each.back_seconds))
            rows.append((str(each.number), each.case, " ".join(each.machines), *times, "; ".join(each.violations)))
        told = [each.went_on_seconds for each in self.outcomes if each.went_on_seconds is not None]
        lines = [*_table(rows), f"seed {self.seed}, {len(self.outcomes)} cases"]
        if told:
            lines.append(f"until training went on: median {median(told):.1f} s, longest {max(told):.1f} s")
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

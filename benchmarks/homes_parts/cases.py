"""Cases of benchmarks.homes: a population, a model, and how long it is watched."""

from dataclasses import dataclass
from typing import Final

from benchmarks.homes_parts.population import FIVE, FOUR, THREE, TWO, Population, draw


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    population: Population
    model: str
    settle_seconds: float = 60.0
    """Time after the first update that is not measured."""
    measure_seconds: float = 120.0
    parts: tuple[str, ...] = ("state", "kills")
    """Parts that are measured unless others are asked for."""

    @property
    def has_peers(self) -> bool:
        """Whether all machines together have the memory for a whole model each, and peers the code of the model."""
        return self.model in ("wide-5", "wide-50")

    @property
    def title(self) -> str:
        return f"{self.name}: {self.model}, {len(self.population.homes)} homes"


_LARGE_SECONDS: Final = 180.0
_DRAWN: Final = {7: "wide-5", 8: "wide-50", 9: "wide-50", 10: "wide-5", 11: "wide-200", 12: "wide-50"}
"""Model of each drawn population, by its seed. Together these populations have every kind of line."""

QUICK: Final = Case("quick", TWO, "wide-5", settle_seconds=10.0, measure_seconds=20.0, parts=("state",))

CASES: Final = {
    case.name: case
    for case in (
        QUICK,
        Case("three", THREE, "gpt2-5"),
        Case("five", FIVE, "gpt2-5"),
        Case("four", FOUR, "gpt2-5"),
        Case("three-50", THREE, "wide-50", measure_seconds=_LARGE_SECONDS, parts=("state",)),
        Case("five-50", FIVE, "wide-50", measure_seconds=_LARGE_SECONDS, parts=("state",)),
        Case("four-50", FOUR, "wide-50", measure_seconds=_LARGE_SECONDS, parts=("state", "peers")),
        *(
            Case(f"drawn-{seed}", draw(seed), "wide-5", parts=("state", "kills", "peers"))
            if model == "wide-5"
            else Case(f"drawn-{seed}", draw(seed), model, measure_seconds=_LARGE_SECONDS)
            for seed, model in _DRAWN.items()
        ),
    )
}
"""All cases by name; QUICK runs with `--quick` only, or when it is named."""

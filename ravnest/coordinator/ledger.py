"""The ledger: every microbatch is accounted for, from the moment it is fed until every stage has seen its backward."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """One microbatch that has been fed: how many samples it has, and where in the data it stands."""

    microbatch: int
    samples: int
    epoch: int
    position: int
    """How many microbatches of its epoch have been fed once this one is."""


class Ledger:
    """Counts microbatches. `completed` is in order: stages apply microbatches in the order they were fed."""

    def __init__(self, *, completed: int = 0, samples: int = 0, replayed: int = 0) -> None:
        """A new ledger, or one that goes on from a checkpoint: what was in flight then is fed again."""
        self.fed = completed
        self.completed = completed
        self.samples = samples
        self.replayed = replayed
        self.applied_twice = 0
        self._open: dict[int, Entry] = {}

    @property
    def outstanding(self) -> int:
        return len(self._open)

    @property
    def outstanding_samples(self) -> int:
        return sum(entry.samples for entry in self._open.values())

    def feed(self, entry: Entry) -> None:
        assert entry.microbatch not in self._open, "a microbatch is fed once"
        self.fed += 1
        self._open[entry.microbatch] = entry

    def complete(self, microbatch: int) -> Entry | None:
        """The entry of a microbatch that the root reports done; None (and counted) when it was not outstanding."""
        entry = self._open.pop(microbatch, None)
        if entry is None:
            self.applied_twice += 1
            return None
        self.completed += 1
        self.samples += entry.samples
        return entry

    def counts(self) -> dict[str, int]:
        """The ledger as the summary shows it; `lost` are those fed and never completed."""
        return {
            "fed": self.fed,
            "completed": self.completed,
            "replayed": self.replayed,
            "lost": len(self._open),
            "applied_twice": self.applied_twice,
        }

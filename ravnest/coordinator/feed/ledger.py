"""Ledger: accounts for every microbatch, from the moment it is fed until every stage has computed its backward."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DataPosition:
    """Position in the data between two updates, from which a resumed run continues."""

    epoch: int = 0
    position: int = 0
    """Microbatches of that epoch that have been used."""
    microbatches: int = 0
    """Microbatches that have been used in all."""
    updates: int = 0
    samples: int = 0
    data_state: str = ""
    """State of the data's own random generators at the start of the epoch; empty without any."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One microbatch that has been fed, and the position of the run once it has been applied."""

    microbatch: int
    samples: int
    after: DataPosition
    completes_update: bool = True
    """Whether an update is applied with it; the gradients of other microbatches are only summed."""


class Ledger:
    """Counts microbatches. A cluster completes its microbatches in order; several clusters complete theirs in any
    order."""

    def __init__(self, start: DataPosition = DataPosition()) -> None:  # noqa: B008 (a frozen value)
        """A new ledger, or one that continues from a checkpoint: microbatches in flight then are fed again."""
        self.fed = start.microbatches
        self.completed = start.microbatches
        self.samples = start.samples
        self.replayed = 0
        self.applied_twice = 0
        self._applied = start
        self._epoch_end: DataPosition | None = None
        self._open: dict[int, LedgerEntry] = {}
        self._next = start.microbatches
        """All microbatches before this one have been completed."""
        self._ahead: dict[int, LedgerEntry] = {}
        """Microbatches completed while an earlier one is still in flight in another cluster."""

    @property
    def applied(self) -> DataPosition:
        """The position of the run: everything before it has been applied to the weights of some cluster."""
        end = self._epoch_end
        return end if end is not None and end.microbatches == self._applied.microbatches else self._applied

    @property
    def last_applied(self) -> DataPosition:
        """The same before the end of an epoch, so that a run which continues from it reaches that end again."""
        return self._applied

    @property
    def updates(self) -> int:
        return self._applied.updates

    @property
    def outstanding(self) -> int:
        return len(self._open)

    def feed(self, entry: LedgerEntry) -> None:
        assert entry.microbatch not in self._open, "a microbatch is fed once"
        self.fed += 1
        self._open[entry.microbatch] = entry

    def complete(self, microbatch: int) -> LedgerEntry | None:
        """Completes a microbatch that the root reports done, and returns its entry. None, and counted, if it was not
        outstanding."""
        entry = self._open.pop(microbatch, None)
        if entry is None:
            self.applied_twice += 1
            return None
        self.completed += 1
        self.samples += entry.samples
        self._ahead[microbatch] = entry
        while (following := self._ahead.pop(self._next, None)) is not None:
            self._next += 1
            if following.completes_update:
                self._applied = following.after
        return entry

    def replay(self, microbatches: Collection[int]) -> None:
        """These microbatches are fed again, to another cluster, because theirs is lost."""
        assert all(number in self._open for number in microbatches), "only a microbatch in flight is fed again"
        self.replayed += len(microbatches)

    def begin_at(self, place: DataPosition) -> None:
        """A run that has fed nothing yet continues from this position instead."""
        assert not self._open and not self._ahead, "nothing is in flight"
        replayed = self.replayed
        self.go_back(place)
        self.replayed = replayed

    def go_back(self, place: DataPosition) -> int:
        """The run goes back to an earlier position and feeds everything since again; returns the number of
        microbatches."""
        again = self.fed - place.microbatches
        self.replayed += again
        self.fed = self.completed = self._next = place.microbatches
        self.samples, self._applied, self._epoch_end = place.samples, place, None
        self._open, self._ahead = {}, {}
        return again

    def end_epoch(self, place: DataPosition) -> None:
        """All of an epoch has been fed: once its last microbatch is applied, the run is at this position."""
        self._epoch_end = place

    def counts(self) -> dict[str, int]:
        """The counts of the summary; `lost` are the microbatches fed and never completed."""
        return {
            "fed": self.fed,
            "completed": self.completed,
            "replayed": self.replayed,
            "lost": len(self._open),
            "applied_twice": self.applied_twice,
        }

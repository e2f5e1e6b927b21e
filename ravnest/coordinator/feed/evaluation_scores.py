"""Evaluation: the batches that are being evaluated, and the means of their results, weighted by samples."""

from collections.abc import Mapping


class Evaluation:
    """Collects the results of evaluation batches."""

    def __init__(self) -> None:
        self._out: dict[int, int] = {}
        self._sums: dict[str, float] = {}
        self.samples = 0

    @property
    def outstanding(self) -> int:
        return len(self._out)

    def sent(self, microbatch: int, samples: int) -> None:
        self._out[microbatch] = samples

    def came(self, microbatch: int, scores: Mapping[str, float]) -> None:
        """Adds a result; one that is not expected is ignored."""
        samples = self._out.pop(microbatch, None)
        if samples is None:
            return
        self.samples += samples
        for name, value in scores.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(value) * samples

    def means(self) -> dict[str, float]:
        return {name: total / self.samples for name, total in self._sums.items()} if self.samples else {}

"""How busy a stage is while it trains: start-up, evaluations and the pauses around them are not part of it."""


class TrainingTime:
    """Seconds of training, and those of them that the stage worked, from when its pipeline was full.

    Until so many microbatches have gone back, everything since the first counts: a short run has nothing else. The
    engine's thread counts, anybody may look.
    """

    def __init__(self, warm_up: int = 0) -> None:
        self.seconds = 0.0
        self.busy_seconds = 0.0
        self._warm_up = warm_up
        self._stands = True
        """Whether training has not begun, or stands still for an evaluation: what is waited then is not counted."""
        self._paused = [0.0, 0.0]
        """Seconds since the last task, and those worked, which count if the next task is training again."""

    def trained(self, waited: float, worked: float, backwards: int) -> None:
        """A task of training took so long, after a wait; so many microbatches have gone back through the stage."""
        if not self._stands:
            self.seconds += self._paused[0] + waited
            self.busy_seconds += self._paused[1]
        self._stands, self._paused = False, [0.0, 0.0]
        self.seconds += worked
        self.busy_seconds += worked
        if self._warm_up and backwards >= self._warm_up:
            self._warm_up = 0
            self.seconds = self.busy_seconds = 0.0

    def paused(self, waited: float, worked: float) -> None:
        """Something else came in between that is part of training, such as taking the mean of a round."""
        self._paused[0] += waited + worked
        self._paused[1] += worked

    def stood_still(self) -> None:
        """Something came in between that is not: an evaluation, or saving what was trained."""
        self._stands, self._paused = True, [0.0, 0.0]


def warm_up_for(in_flight: int) -> int:
    """After so many microbatches a pipeline is full: those in flight at first have come back, and so have those that
    were let in for them."""
    return 2 * in_flight

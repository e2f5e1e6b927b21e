"""Training time of a stage and its busy part, without start-up, evaluations and the pauses around them."""


class TrainingTime:
    """Seconds of training, and of work in them, counted from the moment at which the pipeline is full.

    Until then, everything since the first microbatch counts, so that a short run has figures too. Written by the
    worker's thread; any thread may read it.
    """

    def __init__(self, warm_up: int = 0) -> None:
        """`warm_up`: number of backwards after which the pipeline is full and the count starts again at zero."""
        self.seconds = 0.0
        self.busy_seconds = 0.0
        self._warm_up = warm_up
        self._is_standing = True
        """Whether training has not begun or is interrupted by an evaluation; waits are not counted then."""
        self._paused = [0.0, 0.0]
        """Seconds since the last training task, and of work in them; counted if the next task is training again."""

    def trained(self, waited: float, worked: float, backwards: int) -> None:
        """Counts a training task and the wait before it; `backwards` is the number of backwards so far."""
        if not self._is_standing:
            self.seconds += self._paused[0] + waited
            self.busy_seconds += self._paused[1]
        self._is_standing, self._paused = False, [0.0, 0.0]
        self.seconds += worked
        self.busy_seconds += worked
        if self._warm_up and backwards >= self._warm_up:
            self._warm_up = 0
            self.seconds = self.busy_seconds = 0.0

    def paused(self, waited: float, worked: float) -> None:
        """Counts other work that belongs to training, such as applying the mean of a round."""
        self._paused[0] += waited + worked
        self._paused[1] += worked

    def stood_still(self) -> None:
        """Notes work that does not belong to training: an evaluation or a save."""
        self._is_standing, self._paused = True, [0.0, 0.0]


def warm_up_for(in_flight: int) -> int:
    """Number of backwards after which a pipeline is full: the first microbatches in flight and their successors have
    returned."""
    return 2 * in_flight

"""The small nested settings of a job: how the pipeline runs, how clusters average, and when checkpoints are written.

Each is a frozen value, checked when it is made; a wrong one raises JobError with the field and the fix.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ravnest.errors import JobError
from ravnest.version_policy import POLICIES

AVERAGING_CODECS: Final = ("float32", "lossless", "float16", "bfloat16", "int8", "int4")
"""In what the differences of parameters may travel between clusters."""

OUTER_OPTIMIZERS: Final = ("mean", "nesterov")
"""What may be made of the mean difference of all clusters."""


VERSION_POLICIES: Final = tuple(POLICIES)
"""Which weights a backward may see."""

CORRECTIONS: Final = ("none", "discount", "predict", "nesterov", "foresight", "cautious")
"""What may be done about staleness."""

ACTIVATION_CODECS: Final = ("float32", "lossless", "float16", "bfloat16", "int8")
"""In what activations and gradients may travel between stages."""

PRECISIONS: Final = ("float32", "bfloat16", "float16")
"""In what a stage may compute its products and convolutions."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How microbatches flow through a cluster and how a stage turns them into updates."""

    in_flight: int | None = None
    """Microbatches between their forward and their backward in one cluster, at most. 1 trains exactly as a
    plain loop would; more keep every stage busy at the price of staleness. None: chosen from the number of
    stages."""

    max_staleness: int | None = None
    """Updates a stage may apply between a microbatch's forward and its backward, at most. None: whatever
    `in_flight` leads to."""

    accumulate: int = 1
    """Microbatches whose gradients are averaged into one update."""

    clip_norm: float | None = None
    """Largest norm of a stage's own gradient; a longer one is scaled down to it. It is each stage's norm and
    not the whole model's: the norm over all stages is known only after the last backward of a microbatch, so
    every stage would have to wait for all others at each update."""

    clip_value: float | None = None
    """Largest absolute value of a gradient entry. Unlike `clip_norm` it means the same for every cut."""

    versions: str | None = None
    """Which weights a backward sees. "stash": those of its forward, which are kept with the activations. "recompute":
    the same weights, and the activations are computed a second time instead of being kept. "latest": the weights of
    now, with activations computed a second time from them. "double": those of its forward, of which there are never
    more than two, because no more microbatches are in flight than `accumulate`. None: "stash" where memory allows it,
    otherwise what takes less."""

    correction: str | None = None
    """What is done about staleness: "none", "discount" (a lower learning rate the staler an update is, at the
    beginning), "predict" (a forward uses weights as they are expected to be at its backward), "nesterov" (a step with
    more momentum, that looks ahead), "foresight" (these two) or "cautious" (foresight with the discount). None: what
    learns best, by `python -m benchmarks.quality`."""

    codec: str | None = None
    """In what activations and gradients travel between stages: float32, float16, bfloat16 or int8 (a scale for each
    block). None: chosen for each link, from its speed."""

    precision: str = "float32"
    """In what products and convolutions are computed: float32, or bfloat16 or float16 with automatic mixed precision.
    Parameters and their updates are float32 always."""

    compiled: bool = False
    """Let each provider compile its stage with torch.compile; slow at first, and faster on some devices."""

    split_backward: bool | None = None
    """Compute the gradients for the stage before first, send them, and only then those for a stage's own weights. None:
    where that shortens the way of a microbatch."""

    trace: int = 200
    """Microbatches whose way through the stages is written to trace.json in the run directory; 0: none."""

    cuts: tuple[str, ...] | None = None
    """Modules or parameters with which a stage may begin, by name, such as ("blocks.4", "blocks.8"): the model is cut
    nowhere else. As text, with commas between. None: wherever it is best."""

    record_updates: bool = False
    """Write one line per update of a stage to updates.jsonl in the run directory."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", _names("pipeline.cuts", self.cuts))
        check_whole("pipeline.in_flight", self.in_flight, least=1, optional=True)
        check_whole("pipeline.max_staleness", self.max_staleness, least=0, optional=True)
        check_whole("pipeline.accumulate", self.accumulate, least=1)
        check_positive("pipeline.clip_norm", self.clip_norm)
        check_positive("pipeline.clip_value", self.clip_value)
        check_flag("pipeline.record_updates", self.record_updates)
        check_one_of("pipeline.versions", self.versions, VERSION_POLICIES, optional=True)
        check_one_of("pipeline.correction", self.correction, CORRECTIONS, optional=True)
        check_one_of("pipeline.codec", self.codec, ACTIVATION_CODECS, optional=True)
        check_one_of("pipeline.precision", self.precision, PRECISIONS)
        check_flag("pipeline.compiled", self.compiled)
        if self.split_backward is not None:
            check_flag("pipeline.split_backward", self.split_backward)
        check_whole("pipeline.trace", self.trace, least=0)
        if self.versions == "double" and self.accumulate < max(2, self.in_flight or 0):
            raise JobError(
                'pipeline.versions="double" keeps two versions of the weights, so no more microbatches can be in flight'
                f" than pipeline.accumulate, which is {self.accumulate}: set pipeline.accumulate to at least "
                f"{max(2, self.in_flight or 0)}, or leave pipeline.versions out"
            )
        if self.clip_norm is not None and self.clip_value is not None:
            raise JobError(
                "pipeline.clip_norm and pipeline.clip_value are both set and would clip one another: set one of them"
            )


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """How clusters that train the same model bring together what each of them learned. One cluster averages nothing."""

    every: int | None = None
    """Samples, of all clusters together, between two rounds. None: chosen from the plan, so that a round takes a small
    part of the time between two."""

    outer: str = "mean"
    """What a round makes of the weighted mean of the clusters' differences: "mean" takes it as it is, "nesterov" as the
    gradient of a step with Nesterov momentum, as in DiLoCo."""

    outer_rate: float | None = None
    """What the step is multiplied with. None: 1."""

    outer_momentum: float | None = None
    """The momentum of the step. None: 1 - 1/sqrt(C) for nesterov with C clusters. The mean has none."""

    codec: str = "float32"
    """In what differences of parameters travel: float32, float16, bfloat16, int8 (a scale for each block) or int4 (the
    same; what is lost in one round is added in the next). Buffers and counters always travel as they are."""

    blocking: bool = False
    """Let all clusters wait for a round, instead of averaging in the background while they train on. For tests of
    exactness, and for comparing."""

    rate_factor: float | None = None
    """What the learning rate is multiplied with where several clusters train. None: for Adam and its kin the fourth
    root of their number, with `blocking` the square root, because a round rests on as many times the data; 1 for
    others."""

    optimizer_state: bool = False
    """Average what the optimizer keeps for each parameter too (momentum, second moments), and not the parameters
    alone. Rounds get as many times larger."""

    fragments: int = 1
    """Into how many groups the parameters are divided: every round averages one of them in turn, so that the peak on
    a line stays low. 1 averages all of them in every round."""

    outlier: float | None = 10.0
    """A cluster whose difference is this many times as long as those of the others is scaled down to that; one that is
    10 times as long again is left out of the round. None: none is."""

    def __post_init__(self) -> None:
        check_whole("averaging.every", self.every, least=1, optional=True)
        check_one_of("averaging.outer", self.outer, OUTER_OPTIMIZERS)
        check_positive("averaging.outer_rate", self.outer_rate)
        check_positive("averaging.rate_factor", self.rate_factor)
        momentum = self.outer_momentum
        if momentum is not None and (
            isinstance(momentum, bool) or not isinstance(momentum, int | float) or not 0 <= momentum < 1
        ):
            raise JobError(f"averaging.outer_momentum is {momentum!r}: give a number from 0 to below 1, or None")
        check_one_of("averaging.codec", self.codec, AVERAGING_CODECS)
        check_flag("averaging.blocking", self.blocking)
        check_flag("averaging.optimizer_state", self.optimizer_state)
        check_whole("averaging.fragments", self.fragments, least=1)
        check_positive("averaging.outlier", self.outlier)
        if self.outlier is not None and self.outlier <= 1:
            raise JobError(
                f"averaging.outlier is {self.outlier!r}: give a number above 1, or None to switch it off; "
                "half of all differences are longer than the others'"
            )
        if self.outer == "mean" and momentum is not None:
            raise JobError(
                'averaging.outer_momentum is set, and averaging.outer="mean" has none: set averaging.outer="nesterov", '
                "or leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the state of all stages is saved. One checkpoint is always written when a run ends."""

    every_seconds: float | None = 60.0
    """Seconds between two checkpoints, at most: each is begun as much earlier as it takes to be written. None: not by
    time."""

    every_updates: int | None = None
    """Updates between two checkpoints, and so what a crash may cost, at most: training waits for one that is being
    written rather than go beyond that. None: not by count."""

    keep: int = 2
    """How many of the latest checkpoints stay on disk."""

    def __post_init__(self) -> None:
        check_positive("checkpoint.every_seconds", self.every_seconds)
        check_whole("checkpoint.every_updates", self.every_updates, least=1, optional=True)
        check_whole("checkpoint.keep", self.keep, least=1)


def _names(field: str, value: object) -> tuple[str, ...] | None:
    """The names in a sequence of them, or in one text with commas; raises JobError for anything else."""
    if value is None:
        return None
    names = tuple(each.strip() for each in value.split(",")) if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not names or not all(isinstance(each, str) and each for each in names):
        raise JobError(f"{field} is {value!r}: give names of modules or parameters, such as blocks.4,blocks.8, or None")
    return tuple(names)


def check_whole(field: str, value: object, *, least: int, optional: bool = False) -> None:
    """Raise JobError unless `value` is an int of at least `least` (or None, where `optional`)."""
    if value is None and optional:
        return
    # bool is an int in Python, and `epochs=True` is a mistake.
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        or_none = " or None" if optional else ""
        raise JobError(f"{field} is {value!r}: give a whole number of at least {least}{or_none}")


def check_one_of(field: str, value: object, known: Sequence[str], *, optional: bool = False) -> None:
    """Raise JobError unless `value` is one of the known names (or None, where `optional`)."""
    if value is None and optional:
        return
    if value not in known:
        raise JobError(f"{field} is {value!r}: give one of {', '.join(known)}{' or None' if optional else ''}")


def check_positive(field: str, value: object) -> None:
    """Raise JobError unless `value` is None or a finite number above zero."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise JobError(f"{field} is {value!r}: give a number above 0, or None to switch it off")


def check_flag(field: str, value: object) -> None:
    """Raise JobError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise JobError(f"{field} is {value!r}: give True or False")

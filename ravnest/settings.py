"""Nested settings of a job: the pipeline, the averaging of clusters, and checkpoints.

Each is a frozen value that is checked when it is constructed; a mistake raises JobError with the field and the fix.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ravnest.errors import JobError
from ravnest.version_policy import POLICIES

AVERAGING_CODECS: Final = ("auto", "float32", "lossless", "float16", "bfloat16", "int8", "int4")
"""Codecs for the parameter differences that clusters exchange."""

OUTER_OPTIMIZERS: Final = ("mean", "nesterov")
"""Outer optimizers, which turn the mean difference of all clusters into a step."""

VERSION_POLICIES: Final = tuple(POLICIES)
"""Names of the version policies, which say which weights a backward uses."""

CORRECTIONS: Final = ("none", "discount", "predict", "nesterov", "foresight", "cautious")
"""Corrections of staleness."""

ACTIVATION_CODECS: Final = ("float32", "lossless", "float16", "bfloat16", "int8")
"""Codecs for activations and gradients between stages."""

PRECISIONS: Final = ("float32", "bfloat16", "float16")
"""Element types in which a stage may compute matrix products and convolutions."""


MOMENTS: Final = ("float32", "8bit")
"""Forms in which a stage may hold the optimizer's moments between updates."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How microbatches flow through a cluster, and how a stage turns them into updates."""

    in_flight: int | None = None
    """Maximum number of microbatches between forward and backward in one cluster. 1 trains exactly like a plain loop;
    more keep every stage busy, at the price of staleness. None: chosen from the number of stages."""

    max_staleness: int | None = None
    """Maximum number of updates that a stage may apply between a microbatch's forward and its backward. None: no bound
    other than the one that follows from `in_flight`."""

    accumulate: int = 1
    """Microbatches whose gradients are averaged into one update."""

    clip_norm: float | None = None
    """Maximum norm of a stage's gradient; a longer gradient is scaled down to it. The norm is that of each stage, not
    of the whole model: the norm over all stages is known only after the last backward of a microbatch, so every stage
    would have to wait for all others at each update."""

    clip_value: float | None = None
    """Maximum absolute value of a gradient entry. Unlike `clip_norm`, its effect does not depend on the cuts."""

    versions: str | None = None
    """Which weights a backward uses. "stash": the weights of its forward, which are kept together with the activations.
    "stash_8bit": the same, with the weights in 8 bits. "recompute": the weights of its forward, but the activations are
    recomputed instead of kept. "in_place": the current weights, with the activations of the forward. "latest": the
    current weights, with activations recomputed from them. "double": the weights of its forward, of which there are
    never more than two versions, because at most `accumulate` microbatches are in flight. None: chosen by the loss that
    it costs, then by the memory that it takes."""

    correction: str | None = None
    """Correction of staleness: "none", "discount" (at the beginning, a lower learning rate for staler updates),
    "predict" (a forward uses the weights predicted for its backward), "nesterov" (a step with more momentum that looks
    ahead), "foresight" (predict and nesterov) or "cautious" (foresight and discount). None: the correction that learns
    best in `python -m benchmarks.quality`."""

    codec: str | None = None
    """Codec of activations and gradients between stages: float32, lossless, float16, bfloat16 or int8 (with a scale per
    block). None: chosen for each link by its speed."""

    precision: str = "float32"
    """Element type of matrix products and convolutions: float32, or bfloat16 or float16 with automatic mixed precision.
    Parameters and their updates are always float32."""

    moments: str = "float32"
    """How a stage holds the optimizer's moments between updates: "float32", or "8bit" with a scale for every 256
    values, in a quarter of the memory. For Adam, AdamW, NAdam, and SGD with momentum."""

    compiled: bool = False
    """Compile each stage with torch.compile; slow to start, and faster on some devices."""

    split_backward: bool | None = None
    """Compute the gradients for the previous stage first, send them, and only then compute the gradients of the stage's
    own weights. None: if that shortens the latency of a microbatch."""

    trace: int = 200
    """Number of microbatches whose timeline is written to trace.json in the run directory; 0: none."""

    cuts: tuple[str, ...] | None = None
    """Names of the modules or parameters at which a stage may begin, such as ("blocks.4", "blocks.8"); the model is cut
    nowhere else. May be one text, separated by commas. None: the planner chooses."""

    record_updates: bool = False
    """Write one line per update of each stage to updates.jsonl in the run directory."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cuts", _names("pipeline.cuts", self.cuts))
        check_whole("pipeline.in_flight", self.in_flight, minimum=1, optional=True)
        check_whole("pipeline.max_staleness", self.max_staleness, minimum=0, optional=True)
        check_whole("pipeline.accumulate", self.accumulate, minimum=1)
        check_positive("pipeline.clip_norm", self.clip_norm)
        check_positive("pipeline.clip_value", self.clip_value)
        check_flag("pipeline.record_updates", self.record_updates)
        check_one_of("pipeline.versions", self.versions, VERSION_POLICIES, optional=True)
        check_one_of("pipeline.correction", self.correction, CORRECTIONS, optional=True)
        check_one_of("pipeline.codec", self.codec, ACTIVATION_CODECS, optional=True)
        check_one_of("pipeline.precision", self.precision, PRECISIONS)
        check_one_of("pipeline.moments", self.moments, MOMENTS)
        check_flag("pipeline.compiled", self.compiled)
        if self.split_backward is not None:
            check_flag("pipeline.split_backward", self.split_backward)
        check_whole("pipeline.trace", self.trace, minimum=0)
        if self.versions == "double" and self.accumulate < max(2, self.in_flight or 0):
            raise JobError(
                'pipeline.versions="double" keeps two versions of the weights, so no more microbatches can be in flight'
                f" than pipeline.accumulate, which is {self.accumulate}: set pipeline.accumulate to at least "
                f"{max(2, self.in_flight or 0)}, or leave pipeline.versions out"
            )
        if self.clip_norm is not None and self.clip_value is not None:
            raise JobError(
                "pipeline.clip_norm and pipeline.clip_value are both set and would interfere: set only one of them"
            )


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """How clusters that train the same model average their parameters. A single cluster averages nothing."""

    every: int | None = None
    """Samples between two rounds, counted over all clusters. None: chosen from the plan, so that a round takes a small
    part of the time between two rounds."""

    outer: str = "mean"
    """How a round applies the weighted mean of the clusters' differences: "mean" applies it unchanged, "nesterov" uses
    it as the gradient of a step with Nesterov momentum, as in DiLoCo."""

    outer_rate: float | None = None
    """Factor of the outer step. None: 1."""

    outer_momentum: float | None = None
    """Momentum of the outer step. None: 1 - 1/sqrt(C) for nesterov with C clusters. The mean has no momentum."""

    codec: str = "auto"
    """Codec of the parameter differences. "auto": for each ring, the most precise of float32, bfloat16, int8 and int4
    with which rounds take at most 15 % of its lines. Or one for all rings: float32, lossless, float16, bfloat16, int8
    or int4. int8 and int4 have a scale per block and use error feedback: the quantization error of a round is added in
    the next. Buffers and counters are always sent unchanged."""

    blocking: bool = False
    """Stop training in all clusters during a round, instead of averaging in the background. For exactness tests and
    comparisons."""

    rate_factor: float | None = None
    """Factor of the learning rate with several clusters. None: for Adam and similar optimizers the fourth root of the
    number of clusters, or with `blocking` the square root, because a round is based on that many times the data; 1 for
    other optimizers."""

    optimizer_state: bool = False
    """Average the optimizer's state of each parameter as well (momentum, second moments). Rounds become larger by the
    size of that state."""

    fragments: int = 1
    """Number of groups of parameters. Each round averages one group in turn, which keeps the peak load of a link low.
    1: every round averages all parameters."""

    outlier: float | None = 10.0
    """A difference that is more than this many times as long as those of the other clusters is scaled down to that
    length; if it is another 10 times as long, the cluster is left out of the round. None: no check."""

    def __post_init__(self) -> None:
        check_whole("averaging.every", self.every, minimum=1, optional=True)
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
        check_whole("averaging.fragments", self.fragments, minimum=1)
        check_positive("averaging.outlier", self.outlier)
        if self.outlier is not None and self.outlier <= 1:
            raise JobError(
                f"averaging.outlier is {self.outlier!r}: give a number above 1, because half of all differences are "
                "longer than those of the others, or None to switch it off"
            )
        if self.outer == "mean" and momentum is not None:
            raise JobError(
                'averaging.outer_momentum is set, and averaging.outer="mean" has none: set averaging.outer="nesterov", '
                "or leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When checkpoints of all stages are written. A checkpoint is always written when a run ends."""

    every_seconds: float | None = 60.0
    """Maximum number of seconds between two checkpoints: each starts early by the time that it takes to write. None:
    not by time."""

    every_updates: int | None = None
    """Maximum number of updates between two checkpoints, and so the maximum loss after a crash: training waits for a
    checkpoint that is being written rather than exceed it. None: not by count."""

    keep: int = 2
    """Number of the latest checkpoints to keep on disk."""

    exact: bool = False
    """Never round saved state. By default, copies of a stage's state are rounded where a line is too slow for all of
    their bytes: parameters to int8 differences, moments to 8 bits. On one machine, state is always exact."""

    def __post_init__(self) -> None:
        check_flag("checkpoint.exact", self.exact)
        check_positive("checkpoint.every_seconds", self.every_seconds)
        check_whole("checkpoint.every_updates", self.every_updates, minimum=1, optional=True)
        check_whole("checkpoint.keep", self.keep, minimum=1)


def _names(field: str, value: object) -> tuple[str, ...] | None:
    """The names in a sequence, or in one text separated by commas; raises JobError for anything else."""
    if value is None:
        return None
    names = tuple(each.strip() for each in value.split(",")) if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not names or not all(isinstance(each, str) and each for each in names):
        raise JobError(f"{field} is {value!r}: give names of modules or parameters, such as blocks.4,blocks.8, or None")
    return tuple(names)


def check_whole(field: str, value: object, *, minimum: int, optional: bool = False) -> None:
    """Raises JobError unless `value` is an int of at least `minimum` (or None, if `optional`)."""
    if value is None and optional:
        return
    # bool is a subclass of int, and `epochs=True` is a mistake.
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        or_none = " or None" if optional else ""
        raise JobError(f"{field} is {value!r}: give a whole number of at least {minimum}{or_none}")


def check_one_of(field: str, value: object, known: Sequence[str], *, optional: bool = False) -> None:
    """Raises JobError unless `value` is one of the known names (or None, if `optional`)."""
    if value is None and optional:
        return
    if value not in known:
        raise JobError(f"{field} is {value!r}: give one of {', '.join(known)}{' or None' if optional else ''}")


def check_positive(field: str, value: object) -> None:
    """Raises JobError unless `value` is None or a finite number above zero."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise JobError(f"{field} is {value!r}: give a number above 0, or None to switch it off")


def check_flag(field: str, value: object) -> None:
    """Raises JobError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise JobError(f"{field} is {value!r}: give True or False")

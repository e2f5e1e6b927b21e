"""Cost model of one cluster: the load of each stage on its machine and lines, and the resulting rate.

docs/planning.md has the formulas. A cluster takes a microbatch every `period_seconds`: the period of its slowest stage
or line, or longer if too few microbatches are in flight to cover the round trip through all stages.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ravnest.planner.link_codecs import ClusterLines, LinkCodec, assumed_share, choose_codecs
from ravnest.planner.model_costs import ModelCosts, Table
from ravnest.planner.pipeline_depth import enough_in_flight
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.queued_values import queued_bytes
from ravnest.units import counted

FRAME_SECONDS: Final = 300e-6
"""Processor time of a frame for packing, transport and handing it between threads; nearly independent of its size.
Measured by `python -m benchmarks.overhead` on an AMD EPYC at 2.6 GHz; other machines of this age differ by less than a
factor of two."""

HANDLED_BYTES_PER_SECOND: Final = 2.5e8
"""Rate at which a stage's own processor packs, encrypts and unpacks: a frame of 655 kB took the network thread 2.3 to
3.9 ms on the same machine."""

EVENNESS: Final = 0.95
"""Share of the slowest stage's rate that several stages reach with enough in flight: their timing varies. Measured in
the WAN lab, by `python -m benchmarks.planner`."""

SPARE: Final = 1.3
"""Factor on the memory of a stage for fragmentation and network buffers, measured by `python -m benchmarks.memory`."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """A stage between two places of the model, on one provider, for one microbatch."""

    provider: str
    start: int
    """The place in the model where it begins, as `split` counts them."""
    end: int
    compute_seconds: float
    """Forward, backward, update, and handling frames."""
    up_seconds: float
    """Sending to both neighbours, over the provider's own line."""
    down_seconds: float
    line_seconds: float
    """The line to the stage before, in its slower direction; for a root that gets looked-up rows from the leaf, the
    line to the leaf."""
    trip_seconds: float
    """Its part of the round trip of a microbatch, with that line."""
    memory_bytes: float
    parameter_bytes: float
    fed_bytes: float
    relayed_bytes: float
    """Bytes that the coordinator relays between it and the stage before, both ways."""
    saved_bytes: float = 0.0
    """Activations of one microbatch, kept for its backward."""
    unread_bytes: float = 0.0
    """The part of `parameter_bytes` that no backward reads."""
    codec: str = "float32"
    """Codec of the same link."""
    codec_reason: str = ""
    """Why the link has this codec; empty without a link."""

    @property
    def seconds(self) -> float:
        """Time of the busiest of its resources."""
        return max(self.compute_seconds, self.up_seconds, self.down_seconds, self.line_seconds)

    @property
    def limit(self) -> str:
        """The busiest of its resources, in words."""
        named = {
            f"the computation of {self.provider}": self.compute_seconds,
            f"what {self.provider} can send": self.up_seconds,
            f"what {self.provider} can receive": self.down_seconds,
            f"the line between {self.provider} and the stage before": self.line_seconds,
        }
        return max(named, key=lambda name: named[name])


@dataclass(frozen=True, slots=True)
class Cluster:
    """Stages in order from root to leaf, and the rate of the cluster alone."""

    stages: tuple[StageCost, ...]
    in_flight: int
    samples: int
    """In a microbatch."""

    @property
    def providers(self) -> tuple[str, ...]:
        return tuple(stage.provider for stage in self.stages)

    @property
    def looks_up(self) -> bool:
        """Whether the leaf has a link to the root, for looked-up rows."""
        return len(self.stages) > 1 and bool(self.stages[0].codec_reason)

    def before(self, stage: int) -> int | None:
        """The stage that sends this one activations or looked-up rows; None for a root without rows."""
        if stage:
            return stage - 1
        return len(self.stages) - 1 if self.looks_up else None

    def neighbours(self, stage: int) -> tuple[int, ...]:
        """The stages that this one has links with, each once."""
        after = next((k for k in range(len(self.stages)) if self.before(k) == stage), None)
        return tuple(dict.fromkeys(k for k in (self.before(stage), after) if k is not None))

    @property
    def busiest_seconds(self) -> float:
        return max(stage.seconds for stage in self.stages)

    @property
    def round_trip_seconds(self) -> float:
        """Time of one microbatch through all stages and back, with no other in flight."""
        return sum(stage.trip_seconds for stage in self.stages)

    @property
    def needed_in_flight(self) -> int:
        """The fewest in flight that keep the busiest stage or line busy, up to those in flight. The others are a
        reserve for variations, which show when the cluster runs."""
        return max(1, min(self.in_flight, math.ceil(self.round_trip_seconds / self.busiest_seconds - 1e-9)))

    @property
    def enough_in_flight(self) -> int:
        """The number in flight that keeps the cluster busy when microbatches also wait at busy stages and lines."""
        return self.enough_in_flight_at(self.busiest_seconds)

    def enough_in_flight_at(self, period_seconds: float) -> int:
        """The same if a microbatch begins only once in this time, because something else limits the cluster."""
        computing = [stage.compute_seconds for stage in self.stages]
        there_and_back = 2 * [stage.line_seconds for stage in self.stages]
        period = max(period_seconds, self.busiest_seconds)
        return enough_in_flight(self.round_trip_seconds, computing, period, there_and_back)

    @property
    def line_seconds(self) -> float:
        """Time of the line that limits the cluster, for one microbatch; 0 if a stage is the limit."""
        slowest = max(stage.compute_seconds for stage in self.stages)
        return self.busiest_seconds if self.busiest_seconds > slowest else 0.0

    @property
    def period_seconds(self) -> float:
        """Time from one microbatch to the next."""
        evenness = EVENNESS if len(self.stages) > 1 else 1.0
        return max(self.busiest_seconds, self.round_trip_seconds / self.in_flight) / evenness

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.period_seconds

    @property
    def limit(self) -> str:
        """The limit of the rate, in words."""
        if self.round_trip_seconds / self.in_flight > self.busiest_seconds:
            flying = counted(self.in_flight, "microbatch", "microbatches")
            return f"{flying} in flight on a round trip of {self.round_trip_seconds:.3g} s"
        return max(self.stages, key=lambda stage: stage.seconds).limit

    @property
    def flight_reason(self) -> str:
        """The number of microbatches in flight, and why."""
        flying = counted(self.in_flight, "microbatch", "microbatches")
        return (
            f"{flying} in flight: the round trip through all stages takes {self.round_trip_seconds:.3g} s, and the "
            f"busiest stage or line {self.busiest_seconds:.3g} s"
        )


@dataclass(frozen=True, slots=True)
class StageTables:
    """One provider at one position of an order: the figures of `StageCost` for a stage from place i to place j."""

    compute: Table
    up: Table
    down: Table
    line: Table
    """By the place where the stage begins."""
    trip: Table

    @property
    def seconds(self) -> Table:
        return np.maximum(np.maximum(self.compute, self.line[:, None]), np.maximum(self.up, self.down))


def stage_tables(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    provider: Provider,
    before: Provider | None,
    after: Provider | None,
) -> StageTables:
    """Costs of every possible stage on this provider between these neighbours (None: it is the first, or the last),
    with the smallest codec that its links may have."""
    (forward, backward), fed = model.carried(assumed_share(goal)), model.fed_bytes
    compute = compute_seconds(model, goal, provider)
    here = provider.machine
    left = 0.0 if before is None or before.machine == here else 1.0
    right = 0.0 if after is None or after.machine == here else 1.0
    fed_over_line = fed if network.requester.host != here else np.zeros_like(fed)
    up = (left * backward[:, None] + right * forward[None, :]) / provider.up_bytes_per_second
    down = (left * forward[:, None] + right * backward[None, :] + fed_over_line) / provider.down_bytes_per_second
    line, trip = np.zeros_like(forward), compute
    if (before is None) != (after is None):
        # The root and the leaf send each other rows and their gradients; how far apart they are is not known here.
        rows = assumed_share(goal) * model.rows_bytes
        up, down = up + rows / provider.up_bytes_per_second, down + rows / provider.down_bytes_per_second
    if before is not None:
        here_to, back_to = network.line(before, provider), network.line(provider, before)
        forth, back = forward / here_to.bytes_per_second, backward / back_to.bytes_per_second
        line = np.maximum(forth, back)
        trip = trip + (forth + back + here_to.latency_seconds + back_to.latency_seconds)[:, None]
    return StageTables(compute, up, down, line, trip)


def compute_seconds(model: ModelCosts, goal: Goal, provider: Provider) -> Table:
    """Forward, backward, update and handling of frames, for a stage from place i to place j."""
    places = np.arange(len(model.places))
    begins, ends = places == 0, places == model.last
    work = model.between(model.heavy_seconds / provider.compute_speed + model.light_seconds / provider.memory_speed)
    if provider.operator_seconds and model.operators is not None:
        work = np.maximum(work, model.between(model.operators) * provider.operator_seconds)
    if not goal.policy.keeps_activations:
        again = model.between(
            model.heavy_forward_seconds / provider.compute_speed + model.light_forward_seconds / provider.memory_speed
        )
        work = work + again * ~ends[None, :]
    frames = 2.0 * ~begins[:, None] + begins[:, None] + 2.0 * ~ends[None, :] + (model.fed_bytes > 0)
    crossing = model.forward_bytes + model.backward_bytes
    handled = crossing[:, None] + crossing[None, :] + model.fed_bytes
    if model.rows_bytes:
        has_rows = begins[:, None] ^ ends[None, :]
        frames, handled = frames + 2.0 * has_rows, handled + 2.0 * model.rows_bytes * has_rows
    # A leaf updates its weights in place: no microbatch in flight holds them, and its gradients are never stale.
    kept = model.code_byte_seconds if goal.policy.coded else model.copy_byte_seconds
    versioned = model.between(model.versioned_bytes(recomputes=not goal.policy.keeps_activations))
    older = goal.policy.keeps_weights * kept * versioned
    older = (older + model.stale_byte_seconds * model.between(model.parameter_bytes)) * ~ends[None, :]
    step = (model.step_seconds + older) / provider.memory_speed
    seconds = work + step + frames * FRAME_SECONDS + handled / HANDLED_BYTES_PER_SECOND
    # A machine that pretends to be slower waits for most of that time, and does its other work meanwhile.
    pretended: Table = np.maximum(seconds, provider.min_stage_seconds)
    return pretended


def memory_bytes(model: ModelCosts, goal: Goal, in_flight: int) -> Table:
    """Memory of a stage from place i to place j, with this many microbatches in flight in its cluster.

    A leaf holds one at a time: its backward follows at once. The others hold the versions that the policy keeps. With
    several clusters, averaging needs memory too.
    """
    policy = goal.policy
    flying = np.full(len(model.places), float(in_flight))
    flying[model.last] = 1.0
    older = np.full(len(model.places), policy.version_copies(in_flight, predicts=goal.predicts))
    older[model.last] = 0.0
    parameters = model.between(model.parameter_bytes)
    saved = model.between(model.saved_bytes)
    averaging = goal.average_memory if goal.max_clusters != 1 else 0.0
    # Accumulated gradients are held next to those of the current microbatch.
    summed = 1.0 if goal.accumulate > 1 else 0.0
    held = 2.0 + summed + model.state_bytes_per_byte + averaging
    versioned = model.between(model.versioned_bytes(recomputes=not policy.keeps_activations))
    # The latest prediction has all weights.
    predicted = (parameters - versioned) * (
        policy.keeps_weights and not policy.coded and goal.predicts and in_flight > 1
    )
    versions = versioned * older[None, :] + predicted * (older[None, :] > 0)
    kept = saved if policy.keeps_activations else np.zeros_like(saved)
    activations = saved + (flying[None, :] - 1.0) * kept + queued_bytes(model, in_flight)
    total: Table = SPARE * (parameters * held + versions + activations)
    return total


def cluster_of(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    order: Sequence[Provider],
    cuts: Sequence[int],
    in_flight: int,
) -> Cluster:
    """The cluster of these providers in this order, cut at these places (indices into `model.places`), with the best
    codec for each link."""
    bounds = (0, *cuts, model.last)
    held = memory_bytes(model, goal, in_flight)
    lines = ClusterLines.of(model, network, order, cuts)
    compute = [float(compute_seconds(model, goal, p)[bounds[k], bounds[k + 1]]) for k, p in enumerate(order)]
    codecs = choose_codecs(lines, goal, compute, in_flight)
    loads = lines.loads([chosen.codec for chosen in codecs])
    stages, unread = [], model.unread_bytes
    for number, (provider, load) in enumerate(zip(order, loads, strict=True)):
        i, j = bounds[number], bounds[number + 1]
        has_link = number > 0 or len(codecs) == len(order)
        chosen = codecs[number - 1] if has_link else LinkCodec("float32", "")
        relayed = has_link and network.relayed(order[number - 1], provider)
        stages.append(
            StageCost(
                provider=provider.name,
                start=model.places[i],
                end=model.places[j],
                compute_seconds=compute[number],
                up_seconds=load.up_seconds,
                down_seconds=load.down_seconds,
                line_seconds=load.line_seconds,
                trip_seconds=compute[number] + load.way_seconds,
                memory_bytes=float(held[i, j]),
                parameter_bytes=float(model.parameter_bytes[j] - model.parameter_bytes[i]),
                fed_bytes=float(model.fed_bytes[i, j]),
                unread_bytes=0.0 if unread is None else float(unread[j] - unread[i]),
                saved_bytes=float(model.saved_bytes[j] - model.saved_bytes[i]),
                relayed_bytes=sum(lines.links[number - 1].carried(chosen.codec)) if relayed else 0.0,
                codec=chosen.codec,
                codec_reason=chosen.reason,
            )
        )
    return Cluster(tuple(stages), in_flight, model.samples)

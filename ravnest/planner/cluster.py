"""One cluster: what each stage takes of its machine and its lines, and the rate that comes of it.

The formulas are in docs/planning.md. A cluster takes a microbatch every `period_seconds`: that of its slowest stage or
line, or longer where too few microbatches are in flight to cover the way through all stages and back.
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
from ravnest.units import counted

FRAME_SECONDS: Final = 300e-6
"""Processor time that a frame costs a node beyond its computation: packing, the transport, passing it from thread to
thread. It hardly depends on the frame's size. Measured by `python -m benchmarks.overhead` on an AMD EPYC at 2.6 GHz;
other machines of this age differ by less than a factor of two."""

HANDLED_BYTES_PER_SECOND: Final = 2.5e8
"""What packing, encrypting and unpacking costs a stage on its own processor: a frame of 655 kB took its network's
thread 2.3 to 3.9 ms on the same machine."""

EVENNESS: Final = 0.95
"""What several stages reach of the rate of the slowest of them, with enough in flight: they do not take turns as evenly
as formulas have it. Measured in the WAN lab, by `python -m benchmarks.planner`."""

SPARE: Final = 1.3
"""Beyond what a stage holds: fragments, buffers of the network. `python -m benchmarks.memory` measures this factor."""


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
    """What it sends, over its own line; of both neighbours."""
    down_seconds: float
    line_seconds: float
    """What crosses between it and the stage before, over the line between them: of both directions the slower."""
    trip_seconds: float
    """Its part of the way of a microbatch through all stages and back, with the line to the stage before."""
    memory_bytes: float
    parameter_bytes: float
    fed_bytes: float
    relayed_bytes: float
    """What the coordinator passes on between it and the stage before, both ways."""
    saved_bytes: float = 0.0
    """What one microbatch keeps for its backward."""
    codec: str = "float32"
    """Of what crosses between it and the stage before."""
    codec_reason: str = ""

    @property
    def seconds(self) -> float:
        """Of whatever of it is busy longest."""
        return max(self.compute_seconds, self.up_seconds, self.down_seconds, self.line_seconds)

    @property
    def limit(self) -> str:
        """What that is, in words."""
        named = {
            f"the computation of {self.provider}": self.compute_seconds,
            f"what {self.provider} can send": self.up_seconds,
            f"what {self.provider} can receive": self.down_seconds,
            f"the line between {self.provider} and the stage before": self.line_seconds,
        }
        return max(named, key=lambda name: named[name])


@dataclass(frozen=True, slots=True)
class Cluster:
    """Stages in order from root to leaf, and the rate of the cluster by itself."""

    stages: tuple[StageCost, ...]
    in_flight: int
    samples: int
    """In a microbatch."""

    @property
    def providers(self) -> tuple[str, ...]:
        return tuple(stage.provider for stage in self.stages)

    @property
    def busiest_seconds(self) -> float:
        return max(stage.seconds for stage in self.stages)

    @property
    def round_trip_seconds(self) -> float:
        """The way of one microbatch through all stages and back, when nothing else is under way."""
        return sum(stage.trip_seconds for stage in self.stages)

    @property
    def needed_in_flight(self) -> int:
        """As many as just keep the busiest stage or line busy, of those in flight. The others are to spare: whether
        they are needed shows when the cluster is at work."""
        return max(1, min(self.in_flight, math.ceil(self.round_trip_seconds / self.busiest_seconds - 1e-9)))

    @property
    def enough_in_flight(self) -> int:
        """As many as keep it busy with what each waits at busy stages and lines, which no stage's or line's time
        tells."""
        computing = [stage.compute_seconds for stage in self.stages]
        there_and_back = 2 * [stage.line_seconds for stage in self.stages]
        return enough_in_flight(self.round_trip_seconds, computing, self.busiest_seconds, there_and_back)

    @property
    def line_seconds(self) -> float:
        """Of the line that is the limit, for one microbatch; 0 where a stage is."""
        slowest = max(stage.compute_seconds for stage in self.stages)
        return self.busiest_seconds if self.busiest_seconds > slowest else 0.0

    @property
    def period_seconds(self) -> float:
        """From one microbatch to the next."""
        evenness = EVENNESS if len(self.stages) > 1 else 1.0
        return max(self.busiest_seconds, self.round_trip_seconds / self.in_flight) / evenness

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.period_seconds

    @property
    def limit(self) -> str:
        """What the rate hangs on."""
        if self.round_trip_seconds / self.in_flight > self.busiest_seconds:
            flying = counted(self.in_flight, "microbatch", "microbatches")
            return f"{flying} in flight on a way of {self.round_trip_seconds:.3g} s"
        return max(self.stages, key=lambda stage: stage.seconds).limit

    @property
    def flight_reason(self) -> str:
        """How many microbatches are in flight, and why."""
        flying = counted(self.in_flight, "microbatch", "microbatches")
        return (
            f"{flying} in flight: the way through all stages and back takes {self.round_trip_seconds:.3g} s, "
            f"and the busiest stage or line {self.busiest_seconds:.3g} s"
        )


@dataclass(frozen=True, slots=True)
class StageTables:
    """One provider at one position of an order: for a stage from place i to place j, what `StageCost` holds."""

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
    """What any stage would cost this provider between these neighbours (None: it is the first, or the last), with the
    smallest codec that its links may have."""
    (forward, backward), fed = model.carried(assumed_share(goal)), model.fed_bytes
    compute = compute_seconds(model, goal, provider)
    here = provider.machine
    left = 0.0 if before is None or before.machine == here else 1.0
    right = 0.0 if after is None or after.machine == here else 1.0
    fed_over_line = fed if network.requester.host != here else np.zeros_like(fed)
    up = (left * backward[:, None] + right * forward[None, :]) / provider.up_bytes_per_second
    down = (left * forward[:, None] + right * backward[None, :] + fed_over_line) / provider.down_bytes_per_second
    line, trip = np.zeros_like(forward), compute
    if before is not None:
        here_to, back_to = network.line(before, provider), network.line(provider, before)
        forth, back = forward / here_to.bytes_per_second, backward / back_to.bytes_per_second
        line = np.maximum(forth, back)
        trip = trip + (forth + back + here_to.latency_seconds + back_to.latency_seconds)[:, None]
    return StageTables(compute, up, down, line, trip)


def compute_seconds(model: ModelCosts, goal: Goal, provider: Provider) -> Table:
    """Forward, backward, update and the handling of frames, for a stage from place i to place j."""
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
    # A leaf alone updates its weights in place: nothing in flight holds them; unless nothing holds them anywhere.
    held = ~ends[None, :] & goal.policy.keeps_weights
    copied = model.between(model.parameter_bytes) * model.copy_byte_seconds * held
    step = (model.step_seconds + copied) / provider.memory_speed
    seconds = work + step + frames * FRAME_SECONDS + handled / HANDLED_BYTES_PER_SECOND
    # One that pretends to be slower waits for most of that time: what else there is to do fits into it.
    pretended: Table = np.maximum(seconds, provider.min_stage_seconds)
    return pretended


def memory_bytes(model: ModelCosts, goal: Goal, in_flight: int) -> Table:
    """What a stage from place i to place j holds, with so many microbatches in flight in its cluster.

    A leaf has one at a time: its backward follows at once. The newest microbatch uses the weights as they are, where
    none are predicted; each older one needs what the policy keeps for it. Where there may be several clusters,
    averaging takes its part too.
    """
    policy = goal.policy
    flying = np.full(len(model.places), float(in_flight))
    flying[model.last] = 1.0
    # With predicted weights the newest microbatch too has weights of its own; with one in flight none are predicted.
    predicted = 1.0 if goal.predicts and in_flight > 1 else 0.0
    older = np.full(len(model.places), policy.older_versions(in_flight) + predicted)
    older[model.last] = 0.0
    parameters = model.between(model.parameter_bytes)
    saved = model.between(model.saved_bytes)
    averaging = goal.average_memory if goal.max_clusters != 1 else 0.0
    # Gradients that are summed up are held beside those of the microbatch at hand.
    summed = 1.0 if goal.accumulate > 1 else 0.0
    held = 2.0 + summed + model.state_bytes_per_byte + averaging + older[None, :]
    kept = saved if policy.keeps_activations else model.forward_bytes[:, None] + model.fed_bytes
    activations = saved + (flying[None, :] - 1.0) * kept
    total: Table = SPARE * (parameters * held + activations)
    return total


def cluster_of(
    model: ModelCosts,
    goal: Goal,
    network: Network,
    order: Sequence[Provider],
    cuts: Sequence[int],
    in_flight: int,
) -> Cluster:
    """The cluster of these providers in this order, cut at these places (indices into `model.places`), each link with
    the codec that is best for it."""
    bounds = (0, *cuts, model.last)
    held = memory_bytes(model, goal, in_flight)
    lines = ClusterLines.of(model, network, order, cuts)
    compute = [float(compute_seconds(model, goal, p)[bounds[k], bounds[k + 1]]) for k, p in enumerate(order)]
    codecs = choose_codecs(lines, goal, compute, in_flight)
    loads = lines.loads([chosen.codec for chosen in codecs])
    stages = []
    for number, (provider, load) in enumerate(zip(order, loads, strict=True)):
        i, j = bounds[number], bounds[number + 1]
        chosen = codecs[number - 1] if number else LinkCodec("float32", "")
        relayed = number > 0 and network.relayed(order[number - 1], provider)
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
                saved_bytes=float(model.saved_bytes[j] - model.saved_bytes[i]),
                relayed_bytes=sum(lines.links[number - 1].carried(chosen.codec)) if relayed else 0.0,
                codec=chosen.codec,
                codec_reason=chosen.reason,
            )
        )
    return Cluster(tuple(stages), in_flight, model.samples)

"""Averaging of a plan: the rings of its clusters, the interval between rounds, and the load on lines and memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ravnest.codecs.codec import CODECS
from ravnest.coordinator.plan.feed_ahead import feed_ahead
from ravnest.errors import PlanError
from ravnest.graph.cutting.layout import layout
from ravnest.graph.portable import PortableGraph
from ravnest.job import Job
from ravnest.planner.averaging import EAGER_UPDATES, Interval, RoundBasis, samples_of_updates
from ravnest.planner.link_codecs import share_of
from ravnest.planner.model_costs import ModelCosts
from ravnest.planner.problem import Goal, Network, Provider
from ravnest.planner.proposal import Proposal, proposal_of
from ravnest.planner.rings.line_shares import WHOLE_LINES, shares_next_to_training
from ravnest.planner.rings.ring_codecs import (
    ASSUMED,
    AUTO,
    RingCodec,
    RingLoad,
    choose_ring_codec,
    in_one_sentence,
    piece_values,
    ring_rates,
)
from ravnest.planner.rings.rings import rings_of
from ravnest.planner.rings.round_time import RoundTime, joining_seconds, round_time
from ravnest.planner.rings.tensors import RingPart, by_fragment, check_can_be_averaged, fragments, tensors_of
from ravnest.settings import Averaging


@dataclass(frozen=True, slots=True)
class CodedPart:
    """A part of a ring, and how it travels."""

    part: RingPart
    codec: RingCodec
    piece_values: int
    """Maximum number of values in a piece; 0: the default."""


@dataclass(frozen=True, slots=True)
class AveragingOf:
    """The parts of the rings of a plan, and the interval between its rounds."""

    parts: tuple[CodedPart, ...]
    basis: RoundBasis
    interval: Interval
    reason: str
    goal: Goal
    plan: Proposal
    """With the rate that this interval gives."""


def averaging_of(
    settings: Averaging,
    graph: PortableGraph,
    model: ModelCosts,
    goal: Goal,
    network: Network,
    providers: Mapping[str, Provider],
    plan: Proposal,
) -> AveragingOf:
    """The averaging of a plan with several clusters."""
    where = layout(graph)
    rings = rings_of(plan, model, network, providers)
    parts = fragments([(ring, tensors_of(graph, where, ring)) for ring in rings], settings.fragments)
    groups = by_fragment(parts)
    coded = [
        each for group in groups for each in _coded(settings, plan, model, goal, group, len(groups), network, providers)
    ]
    coded.sort(key=lambda each: parts.index(each.part))
    joining = max(joining_seconds(cluster, feed_ahead(cluster, providers)) for cluster in plan.clusters)
    times = [
        _round_time(
            settings, [each for each in coded if each.part.fragment == number], joining, plan, network, providers
        )
        for number in range(len(groups))
    ]
    basis = RoundBasis(
        settings,
        plan.rates,
        model.samples,
        goal.accumulate,
        len(groups),
        max(times, key=lambda time: time.seconds),
    )
    interval = basis.interval()
    # The interval and the codecs follow from the plan, and change its predicted rate.
    values = sum(each.part.coded_values for each in coded)
    share = sum(each.part.coded_values * _share(settings, each.codec.codec) for each in coded) / max(values, 1)
    goal = replace(
        goal,
        average_every=max(1, round(interval.samples / model.samples / len(plan.clusters))),
        average_share=share if values else goal.average_share,
    )
    plan = proposal_of(goal, network, providers, plan.clusters)
    reason = f"{interval.reason}; {in_one_sentence([each.codec for each in coded])}"
    return AveragingOf(tuple(coded), basis, interval, reason, goal, plan)


def _coded(
    settings: Averaging,
    plan: Proposal,
    model: ModelCosts,
    goal: Goal,
    group: Sequence[RingPart],
    fragments: int,
    network: Network,
    providers: Mapping[str, Provider],
) -> list[CodedPart]:
    """The parts of the rings of a fragment with the codec of each."""
    together = sum(plan.rates)
    learned = samples_of_updates(EAGER_UPDATES, plan.rates, model.samples, goal.accumulate, fragments)
    seconds = (learned if settings.every is None else settings.every) / together
    rates = ring_rates([part.as_ring() for part in group], network, providers)
    coded = []
    for part, rate in zip(group, rates, strict=True):
        sent = part.ring.sent_times
        moments = _share(settings, "float32") - 1
        plain = 4.0 * (part.values - part.coded_values + moments * part.coded_values)
        chosen = choose_ring_codec(
            settings.codec, RingLoad(sent * 4.0 * part.coded_values, sent * plain, rate), seconds
        )
        coded.append(CodedPart(part, chosen, piece_values(chosen.codec, rate)))
    return coded


def _round_time(
    settings: Averaging,
    coded: Sequence[CodedPart],
    joining: float,
    plan: Proposal,
    network: Network,
    providers: Mapping[str, Provider],
) -> RoundTime:
    # Training stands still for a round that blocks, which then has the lines to itself.
    shares = WHOLE_LINES if settings.blocking else shares_next_to_training(plan.clusters, plan.rates, network)
    return round_time(
        [each.part.as_ring(_share(settings, each.codec.codec)) for each in coded],
        [each.part.values for each in coded],
        [each.codec.codec for each in coded],
        joining,
        network,
        providers,
        shares,
        anchor_bytes_per_value=8.0 if settings.outer == "nesterov" else 4.0,
    )


def within_averaging(graph: PortableGraph, goal: Goal) -> Goal:
    """The goal, limited to one cluster if clusters cannot average this model; PlanError if it requires several."""
    if goal.max_clusters != 1:
        try:
            check_can_be_averaged(graph)
        except PlanError:
            if goal.min_clusters > 1:
                raise
            return replace(goal, max_clusters=1)
    return goal


def averaged_bytes(averaging: Averaging) -> float:
    """Bytes sent in a round for each value of a parameter, as far as they are known before the rings are."""
    return 4 * _share(averaging, ASSUMED if averaging.codec == AUTO else averaging.codec)


def _share(averaging: Averaging, codec: str) -> float:
    """Bytes sent in a round for each byte of a parameter, with this codec."""
    moments = 2.0 if averaging.optimizer_state else 0.0
    return share_of(codec) + moments


def averaging_memory(job: Job) -> float:
    """Bytes of memory that averaging needs for each byte of a parameter."""
    averaging = job.averaging
    # The parameters after the last round, and the outer optimizer's momentum; during a round, this cluster's difference
    # and the mean. All of these are values of 4 bytes.
    numbers = 1 + (averaging.outer == "nesterov") + 2
    # The encoding error carried into this round, and the one that this round adds.
    numbers += 2 * (averaging.codec == AUTO or CODECS[averaging.codec].feedback)
    # Both moments, each as this cluster's value and as the mean. Many optimizers have fewer.
    numbers += 4 * averaging.optimizer_state
    trained = [p for p in job.model.parameters() if p.requires_grad]
    return 4.0 * numbers * sum(p.numel() for p in trained) / max(1, sum(p.nbytes for p in trained))

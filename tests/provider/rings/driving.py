"""Single steps of a round of averaging."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ravnest.net.v1.control_pb2 import (
    Average,
    RingBegin,
    RingCommit,
    RingJoined,
    RingMember,
)
from tests.provider.rings.joined_rings import DEPLOYMENT, JoinedRings, Owner

Joins = Mapping[str, RingJoined]


async def learn(swarm: JoinedRings, *counts: int, seed: int = 0) -> None:
    """Train each cluster on this many microbatches, with other data for each cluster and seed."""
    for number, (cluster, count) in enumerate(zip(swarm.clusters, counts, strict=True)):
        cluster.feed(count, seed=10 * seed + number)
        await cluster.finished(count)


async def join(owners: list[Owner], round: int = 1) -> Joins:
    """All owners take their snapshots and join."""
    found = {}
    for owner in owners:
        owner.obey(average=Average(deployment=DEPLOYMENT, round=round))
        told = await owner.hears("round_joined")
        assert told.round == round and told.deployment == DEPLOYMENT
        [found[owner.name]] = told.rings
    return found


def begin(joins: Joins, attempt: int = 1, round: int = 1) -> Callable[[Owner], None]:
    """A function that tells an owner to begin, with the owners of `joins` as members."""
    total = sum(each.samples for each in joins.values())
    members = [RingMember(node=n, weight=each.samples / total, norm=each.norm) for n, each in joins.items()]
    counters = [max(each) for each in zip(*(j.counters for j in joins.values()), strict=True)]

    def tell(owner: Owner) -> None:
        order = RingBegin(
            deployment=DEPLOYMENT,
            round=round,
            ring=0,
            attempt=attempt,
            members=members,
            counters=counters,
            index=list(joins).index(owner.name),
        )
        owner.obey(ring_begin=order)

    return tell


async def reduced(owners: list[Owner], attempt: int = 1) -> None:
    """All owners report that they have the same mean."""
    told = [await owner.hears("ring_reduced") for owner in owners]
    assert [each.attempt for each in told] == [attempt] * len(owners)
    assert len({each.digest for each in told}) == 1


def commit(owner: Owner, attempt: int = 1, round: int = 1) -> None:
    owner.obey(ring_commit=RingCommit(deployment=DEPLOYMENT, round=round, ring=0, attempt=attempt))


def direct_mean(states: Sequence[Mapping[str, Tensor]], samples: Sequence[int]) -> dict[str, Tensor]:
    """The weighted mean of these states, and the largest value of each counter."""
    return {
        name: sum((s[name].double() * n / sum(samples) for s, n in zip(states, samples, strict=True)), torch.zeros(()))
        if tensor.is_floating_point()
        else torch.stack([state[name] for state in states]).amax(0)
        for name, tensor in states[0].items()
    }


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor], within: float = 0.0) -> bool:
    close = (torch.allclose(one[name].double(), other[name].double(), rtol=0.0, atol=within) for name in one)
    return one.keys() == other.keys() and all(close)

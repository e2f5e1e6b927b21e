"""Construction of a hosted stage: fetch what the order names, check it, and build the stage from it."""

import asyncio
from collections.abc import Callable
from functools import partial

import torch

from ravnest.engine.settings import StageSettings
from ravnest.engine.stage import Stage
from ravnest.errors import GraphError
from ravnest.graph.initial_weights.sources_text import MAX_SOURCES_BYTES, WeightSources, read_sources
from ravnest.graph.weights import WeightsReader
from ravnest.net.rpc.client import CoordinatorClient
from ravnest.net.v1.control_pb2 import Deploy
from ravnest.provider.fetch.artifacts import Artifacts
from ravnest.provider.fetch.graph_text import ArtifactText, GraphText
from ravnest.provider.fetch.progress import FetchProgress
from ravnest.provider.replicas.format import Restored, with_part
from ravnest.provider.rings.lines import RingLines, ring_generation
from ravnest.provider.rings.rings import Rings
from ravnest.provider.stage.host import Host
from ravnest.provider.stage.hosted_stage import HostedStage, RingMembership
from ravnest.provider.stage.records import StageRecords
from ravnest.provider.stage.spans import SpanRecorder
from ravnest.units import byte_size


async def build_stage(
    order: Deploy,
    client: CoordinatorClient,
    host: Host,
    artifacts: Artifacts,
    progress: FetchProgress,
    part: tuple[dict[str, torch.Tensor], dict[str, str]] | None = None,
) -> HostedStage:
    """The stage that the order describes; GraphError or PeerError says why it cannot be built.

    `part`: tensors and metadata of a part of a replica that the stage starts from, in memory of their own. The weights
    that the order names are then only those that never change.
    """
    if order.weights.size_bytes > host.lent_bytes:
        raise GraphError(
            f"stage {order.stage} has weights of {byte_size(order.weights.size_bytes)}, and this provider lends "
            f"{byte_size(host.lent_bytes)}; lend more or use more providers"
        )
    settings = StageSettings.from_json(order.settings_json)
    text = await artifacts.get(order.graph, lambda: GraphText(order.graph.size_bytes), progress)
    listed = partial(_sources, order, artifacts, progress, host.say) if order.sources.id else None
    reader = await artifacts.get(order.weights, lambda: WeightsReader(order.weights.size_bytes), progress, listed)
    weights, metadata = reader.finish()
    del reader  # It refers to every tensor, and the stage releases them one by one.
    if part is not None:
        metadata = part[1]
    restored = Restored.of(weights if part is None else part[0], metadata)

    def build() -> Stage:
        graph = text.graph()
        if part is None:
            own = {w.key: weights.pop(f"weight:{w.key}") for w in graph.weights}
        else:
            own = with_part(graph, weights, part)
        stage = Stage(graph, own, settings, host.device, host.lent_bytes)
        if "version" in metadata:
            stage.restore(restored.optimizer, metadata)
        return stage

    try:
        stage = await asyncio.to_thread(build)
    except KeyError as error:
        raise GraphError(f"the weights of stage {order.stage} lack {error}") from None
    records = StageRecords(settings.record_updates, SpanRecorder(settings.trace))
    membership = await _join_rings(order, stage, host, client, records, restored) if order.rings else None
    return HostedStage(order, stage, host, client, records, membership, restored.applied)


async def _sources(
    order: Deploy, artifacts: Artifacts, progress: FetchProgress, say: Callable[[str], None]
) -> WeightSources | None:
    """How to get tensors of the weights without the coordinator; None if this version cannot read the list. The weights
    have a hash of their own, so they can be fetched without it."""
    size_bytes = order.sources.size_bytes
    progress.total_bytes += size_bytes

    def begin() -> ArtifactText:
        return ArtifactText("the list of the stage's weights", size_bytes, MAX_SOURCES_BYTES)

    try:
        text = await artifacts.get(order.sources, begin, progress, keep=False)
        return await asyncio.to_thread(read_sources, text.content, order.weights.size_bytes)
    except GraphError as error:
        say(f"the first weights cannot be drawn here ({error}): fetching all of them")
        return None


async def _join_rings(
    order: Deploy, stage: Stage, host: Host, client: CoordinatorClient, records: StageRecords, restored: Restored
) -> RingMembership:
    loop = asyncio.get_running_loop()
    rings = await asyncio.to_thread(Rings, order, stage, host.node.node_id, loop, records.tell, restored)
    lines = RingLines(
        order.ring_peers, ring_generation(order), host.node, client, rings.receiver, host.transfers.budget
    )
    return RingMembership(rings, lines)

"""A provider builds only what it was announced, and takes only frames that its stage may get now."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ravnest.engine.settings import StageSettings
from ravnest.errors import GraphError, PeerError, RavnestError
from ravnest.graph.cutting.layout import layout
from ravnest.graph.cutting.partition import split
from ravnest.graph.weights import stream_tensors
from ravnest.microbatch import Marks
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.net.v1.control_pb2 import Deploy
from ravnest.provider.stage.hosted_stage import HostedStage
from ravnest.provider.stage.memory_watch import StageMemory
from ravnest.provider.stage.report import MAX_STALENESS_TOLD, staleness_counts
from ravnest.spec import OptimizerSpec
from tests.provider.stage.fake_client import FakeClient, captured
from tests.provider.stage.stages import a_host, built, references


def an_order(leave_out: str = "") -> tuple[Deploy, FakeClient]:
    """The order to take the leaf of two stages, and the client to fetch it from."""
    found = captured()
    graph = split(found.graph, layout(found.graph).cuts[1:2])[1]
    weights = {f"weight:{w.key}": found.weights[w.key] for w in graph.weights if w.key != leave_out}
    artifacts = {"graph": graph.to_json().encode(), "weights": b"".join(stream_tensors(weights, {}))}
    settings = StageSettings(optimizer=OptimizerSpec("SGD", {"lr": 0.1}).to_json(), stage=1, stages=2)
    order = Deploy(
        deployment="d1", stage=1, stages=2, settings_json=settings.to_json(), generation=4, **references(artifacts)
    )
    return order, FakeClient(artifacts)


def deployed(change: Callable[[Deploy, FakeClient], None] | None = None, leave_out: str = "") -> HostedStage:
    async def make() -> HostedStage:
        order, client = an_order(leave_out)
        if change is not None:
            change(order, client)
        return await built(order, client)

    return asyncio.run(make())


def damage_the_graph(order: Deploy, client: FakeClient) -> None:
    client.artifacts["graph"] = client.artifacts["graph"][:-2] + b" }"


def send_more_than_announced(order: Deploy, client: FakeClient) -> None:
    client.artifacts["graph"] += b" " * 5000


def damage_the_weights(order: Deploy, client: FakeClient) -> None:
    client.artifacts["weights"] = client.artifacts["weights"][:-1] + b"\x01"


def ask_for_too_much(order: Deploy, client: FakeClient) -> None:
    order.graph.size_bytes = 1 << 40


def ask_for_code(order: Deploy, client: FakeClient) -> None:
    order.settings_json = order.settings_json.replace("SGD", "os.system")


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (damage_the_graph, PeerError, "the artifact graph arrived damaged"),
        (send_more_than_announced, PeerError, "is larger than the"),
        (damage_the_weights, PeerError, "the artifact weights arrived damaged"),
        (ask_for_too_much, GraphError, "the stage's graph has 1099511627776 bytes"),
        (ask_for_code, GraphError, "os.system"),
    ],
)
def test_an_order_that_is_not_what_it_says_is_refused(
    change: Callable[[Deploy, FakeClient], None], kind: type[RavnestError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        deployed(change)


def test_weights_that_are_not_there_are_named() -> None:
    with pytest.raises(GraphError, match=r"the weights of stage 1 lack 'weight:layers.2.weight'"):
        deployed(leave_out="layers.2.weight")


def a_feed() -> Frame:
    return Frame(
        kind=FrameKind.FEED,
        microbatch=0,
        marks=Marks(train=True, samples=8, checkpoint=0, flush=False),
        generation=4,
        tensors={"targets": torch.zeros(8, dtype=torch.long)},
        scalars={},
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": FrameKind.FORWARD}, "a FORWARD frame came where only FEED frames may"),
        ({"generation": 3}, "a frame of generation 3 came, this stage is of 4"),
        ({"tensors": {}}, r"missing \['targets'\]"),
        ({"scalars": {"more": 1}}, r"foreign \['more'\]"),
        ({"tensors": {"targets": torch.zeros(8)}}, "has type torch.float32"),
        ({"tensors": {"targets": torch.zeros(8, 2, dtype=torch.long)}}, r"shape \(8, 2\)"),
    ],
)
def test_a_frame_that_does_not_fit_the_stage_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PeerError, match=says):
        deployed().take_feed(replace(a_feed(), **changes))


def test_a_frame_that_fits_is_taken() -> None:
    deployment = deployed()
    deployment.take_feed(a_feed())
    report, saved = deployment.report()
    assert (report.deployment, report.updates, report.forwards, saved) == ("d1", 0, 0, [])
    assert report.peak_memory_bytes > 0


def test_a_report_tells_how_stale_updates_were_however_stale_they_were() -> None:
    assert staleness_counts({}) == []
    assert staleness_counts({0: 3, 2: 1}) == [3, 0, 1]
    assert staleness_counts({70: 5})[70] == 5
    far = staleness_counts({1: 2, MAX_STALENESS_TOLD: 3, 10**6: 4})
    assert len(far) == MAX_STALENESS_TOLD + 1
    assert (sum(far), far[1], far[-1]) == (9, 2, 7)


def test_memory_that_is_short_is_told_and_what_is_exhausted_ends_the_stage_with_a_sentence() -> None:
    free, now = 1 << 40, 0.0
    memory = StageMemory(a_host(), recomputes=False, free_bytes=lambda device: free, clock=lambda: now)
    assert memory.next_step(memory.reading(), 3) is None
    free = 1 << 20
    step = memory.next_step(memory.reading(), 3)
    assert step is not None and (step.kind, step.in_flight) == ("fewer", 2) and "1 MiB are left" in step.reason
    while (step is None or step.kind != "stop") and now < 60:
        now += 1.0
        step = memory.next_step(memory.reading(), 3)
    assert step is not None and step.kind == "stop" and "more are needed" in step.reason

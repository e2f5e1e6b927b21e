"""What a provider refuses, or does without, when it builds a stage."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from ravnest.errors import GraphError
from ravnest.graph.initial_weights.find_initial import InitialWeight, sha256_of
from ravnest.graph.initial_weights.generator_position import position_of
from ravnest.graph.initial_weights.recipe import Recipe
from ravnest.graph.initial_weights.sources_text import sources_text
from ravnest.graph.weights import stream_header
from ravnest.net.v1.control_pb2 import ArtifactRef, Deploy
from ravnest.provider.fetch.artifacts import Artifacts
from ravnest.provider.fetch.progress import FetchProgress
from ravnest.provider.stage.build import build_stage
from tests.provider.stage.kept_model import captured, graphs
from tests.provider.stage.stages import Machine, a_host, run


def test_weights_larger_than_the_lent_memory_are_refused_before_anything_is_fetched() -> None:
    async def test() -> None:
        machine = Machine("anna", 0)
        order = machine.order(1, "ben")
        host = replace(a_host(), lent_bytes=order.weights.size_bytes - 1)
        asked: list[str] = []

        def fetch(artifact: str, offset: int = 0, end: int = 0) -> Any:
            asked.append(artifact)
            return type(machine.client).fetch(machine.client, artifact, offset, end)

        machine.client.fetch = fetch
        with pytest.raises(GraphError, match="this provider lends"):
            await build_stage(order, machine.client, host, Artifacts(machine.client), FetchProgress(0))
        assert not asked

    run(test())


def with_drawn_weights(machine: Machine, change: str = "") -> Deploy:
    """An order whose list draws all weights with an operator of this name, and what they have to become."""
    order = machine.order(1, "ben")
    weights = {f"weight:{spec.key}": captured().weights[spec.key] for spec in graphs()[0].weights}
    recipe = Recipe("normal", (0.0, 1.0), position_of(torch.Generator().manual_seed(0)))
    listed = json.loads(
        sources_text(
            stream_header(weights), {name: InitialWeight(sha256_of(each), recipe) for name, each in weights.items()}
        )
    )
    if change:
        for tensor in listed["tensors"].values():
            tensor["recipe"]["draw"] = change
    text = json.dumps(listed).encode()
    machine.client.artifacts["sources"] = text
    order.sources.CopyFrom(ArtifactRef(id="sources", sha256=hashlib.sha256(text).hexdigest(), size_bytes=len(text)))
    return order


async def built_saying(machine: Machine, order: Deploy) -> list[str]:
    said: list[str] = []
    host = replace(a_host(), say=said.append)
    artifacts = Artifacts(machine.client, say=said.append)
    hosted = await build_stage(order, machine.client, host, artifacts, FetchProgress(0))
    for spec in graphs()[0].weights:
        if (kept := hosted.stage.state_tensors().get(f"weight:{spec.key}")) is not None:
            assert torch.equal(kept, captured().weights[spec.key])
    await hosted.close()
    return said


def test_a_list_with_a_draw_that_this_version_does_not_know_is_fetched_instead() -> None:
    async def test() -> None:
        machine = Machine("anna", 0)
        (said,) = await built_saying(machine, with_drawn_weights(machine, "orthogonal"))
        assert "'orthogonal'" in said and "fetching all of them" in said

    run(test())

"""A checkpoint that the run waits for is uploaded at once, and any other one within the budget for state."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from ravnest.net.v1.control_pb2 import Save
from ravnest.provider.fetch.artifacts import Artifacts
from ravnest.provider.fetch.progress import FetchProgress
from ravnest.provider.replicas.outgoing import OutgoingTransfers
from ravnest.provider.stage.build import build_stage
from tests.provider.replicas.part_ends import AskedBudget
from tests.provider.stage.stages import Machine, a_host, run


def test_a_save_says_how_urgent_its_upload_is_and_how_fast_it_may_be() -> None:
    async def test() -> None:
        budget = AskedBudget()
        host = replace(a_host(), transfers=OutgoingTransfers(budget))
        machine = Machine("anna", 0)
        order = machine.order(1, "ben")
        uploaded: asyncio.Queue[str] = asyncio.Queue()

        async def upload(name: str, chunks: AsyncIterator[bytes]) -> None:
            assert sum([len(chunk) async for chunk in chunks]) > 0
            uploaded.put_nowait(name)

        client: Any = machine.client
        client.upload = upload
        progress = FetchProgress(order.graph.size_bytes + order.weights.size_bytes)
        machine.hosted = await build_stage(order, client, host, Artifacts(client), progress, None)
        machine.open()
        for save in (Save(checkpoint=3, max_bytes_per_second=5e7), Save(checkpoint=9, urgent=True)):
            machine.hosted.save(save)
            assert await uploaded.get() == f"checkpoint-{save.checkpoint}"
        assert budget.asked == [("checkpoint", False, 5e7), ("checkpoint", True, 0.0)]
        assert all(end.link.foreground is budget for end in machine.hosted.generation.links)
        await machine.hosted.close()

    run(test())

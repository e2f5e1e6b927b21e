"""What a provider refuses, or does without, when it builds a stage."""

from dataclasses import replace
from typing import Any

import pytest

from ravnest.errors import LentMemoryError
from ravnest.provider.fetch.artifacts import Artifacts
from ravnest.provider.fetch.progress import FetchProgress
from ravnest.provider.stage.build import build_stage
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
        with pytest.raises(LentMemoryError, match="this provider lends"):
            await build_stage(order, machine.client, host, Artifacts(machine.client), FetchProgress(0))
        assert not asked

    run(test())

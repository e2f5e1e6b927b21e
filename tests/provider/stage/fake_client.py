"""A coordinator as a hosted stage sees it, in memory, and a captured model."""

from collections.abc import AsyncIterator
from functools import cache

import torch.nn.functional as F

from ravnest.graph.capture.capture import Captured, capture
from tests.e2e.jobs import a_net, batches


@cache
def captured() -> Captured:
    return capture(a_net(), F.cross_entropy, {}, batches([8, 5]))


class FakeClient:
    """A coordinator that hands out what it has."""

    def __init__(self, artifacts: dict[str, bytes]) -> None:
        self.artifacts = artifacts

    async def fetch(self, artifact: str, offset: int = 0, end: int = 0) -> AsyncIterator[bytes]:
        data = self.artifacts[artifact]
        for start in range(offset, len(data), 1000):
            yield data[start : start + 1000]

    async def upload(self, name: str, chunks: AsyncIterator[bytes]) -> None:
        async for _ in chunks:
            pass

"""What a provider does with orders that come late."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ravnest.engine.speed.pace import NO_PRETENCE
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Deploy, Stop
from ravnest.provider import agent as module


def test_an_order_of_an_older_generation_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A formation that was given up may still have been telling its providers."""
    taken: list[int] = []

    async def deploy(agent: object, order: Deploy, stay: object) -> None:
        taken.append(order.generation)

    monkeypatch.setattr(module._Agent, "_deploy", deploy)
    orders = [CoordinatorMessage(deploy=Deploy(generation=number)) for number in (3, 5, 4, 5, 7)]

    async def test() -> None:
        agent = module._Agent(
            cast(Any, None), torch.device("cpu"), 1 << 30, "anna", None, None, NO_PRETENCE, None, embedded=True
        )
        said = iter([*orders, CoordinatorMessage(stop=Stop(reason="enough"))])

        async def receive() -> CoordinatorMessage:
            await asyncio.sleep(0)
            return next(said)

        stay: Any = SimpleNamespace(control=SimpleNamespace(receive=receive))
        await agent._obey(stay, cast(Any, None))
        # What another coordinator says counts anew.
        said = iter([orders[0], CoordinatorMessage(stop=Stop(reason="enough"))])
        await agent._obey(stay, cast(Any, None))

    asyncio.run(test())
    assert taken == [3, 5, 5, 7, 3]

"""The coordinator's commands to a provider: which are carried out, and which come too late."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from ravnest.background import BackgroundTasks
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Deploy, Save, Stop
from ravnest.provider.commands import Commands
from ravnest.provider.stage.deployer import StageDeployer
from ravnest.provider.stage.slot import StageSlot

STOP = CoordinatorMessage(stop=Stop(reason="enough"))


class Deployer:
    def __init__(self) -> None:
        self.generations: list[int] = []

    async def deploy(self, order: Deploy) -> None:
        self.generations.append(order.generation)


async def obey(messages: list[CoordinatorMessage], slot: StageSlot, deployer: Deployer) -> None:
    """One session in which the coordinator says this, and then stop."""
    said = iter([*messages, STOP])

    async def receive() -> CoordinatorMessage:
        await asyncio.sleep(0)
        return next(said)

    session: Any = SimpleNamespace(control=SimpleNamespace(receive=receive), client=None)
    parts: Any = SimpleNamespace(expect=lambda order: None)
    nothing: Any = None
    given = cast(StageDeployer, deployer)
    async with BackgroundTasks() as background:
        await Commands(session, slot, given, parts, nothing, background, lambda line: None).obey()


def test_an_order_of_an_older_generation_is_passed_over() -> None:
    """A deployment that was given up may still have been telling its providers."""
    deployer = Deployer()
    orders = [CoordinatorMessage(deploy=Deploy(generation=number)) for number in (3, 5, 4, 5, 7)]

    async def test() -> None:
        slot = StageSlot(lambda line: None)
        await obey(orders, slot, deployer)
        # Another coordinator counts from 0 again.
        await obey(orders[:1], slot, deployer)

    asyncio.run(test())
    assert deployer.generations == [3, 5, 5, 7, 3]


def test_a_command_to_a_stage_that_was_given_up_is_ignored() -> None:
    async def test() -> None:
        deployer = Deployer()
        await obey([CoordinatorMessage(save=Save(checkpoint=1))], StageSlot(lambda line: None), deployer)

    asyncio.run(test())

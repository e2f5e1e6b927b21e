"""Between two microbatches a stage holds no values of those that it has finished: not in a queue, nor in a task."""

import asyncio
import gc
from typing import Any

from ravnest.engine.messages import Message
from ravnest.net.frames.frames import Frame, FrameKind
from ravnest.provider.links.pack_threads import Outgoing
from tests.provider.stage.stages import a_line, run


def test_a_stage_holds_no_values_of_microbatches_that_it_has_finished() -> None:
    async def test() -> None:
        line = await a_line()
        earlier = _carriers()
        await line.train(range(3), 1)
        # A task that sends or receives runs on until it waits for the next frame.
        await asyncio.sleep(0)
        gc.collect()
        left = [each for name, each in _carriers().items() if name not in earlier]
        assert not left
        await line.close()

    run(test())


def _carriers() -> dict[int, Any]:
    """Everything in this process that carries activations or gradients, by identity."""
    return {id(each): each for each in gc.get_objects() if _carries(each)}


def _carries(each: object) -> bool:
    if isinstance(each, Frame):
        return each.kind in (FrameKind.FORWARD, FrameKind.BACKWARD) and bool(each.tensors or each.coded)
    return isinstance(each, Outgoing) or (isinstance(each, Message) and bool(each.values))

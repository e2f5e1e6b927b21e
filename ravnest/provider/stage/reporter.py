"""Reports of the hosted stage: to the coordinator with every heartbeat, and to the user from time to time."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

from ravnest.net.streams.control_channel import ControlLink
from ravnest.net.v1.control_pb2 import CoordinatorMessage, Failed, ProviderMessage, Saved
from ravnest.provider.stage.generation import Generation
from ravnest.provider.stage.hosted_stage import HostedStage
from ravnest.provider.stage.slot import StageSlot

MIN_REPORT_SECONDS: Final = 0.2
"""Minimum time between two reports: without it, every loss would be sent by itself."""
_FIRST_PROGRESS_SECONDS: Final = 2.0
_PROGRESS_SECONDS: Final = 10.0


async def report_stage(
    slot: StageSlot,
    control: ControlLink[ProviderMessage, CoordinatorMessage],
    heartbeat_seconds: float,
    say: Callable[[str], None],
) -> None:
    """Report whatever stage the slot holds, forever: when there is news, and at every heartbeat."""
    failed: Generation | None = None
    while True:
        hosted = await slot.next_stage(after=failed)
        generation = hosted.generation
        news = asyncio.create_task(hosted.wait_for_news())
        waited: list[asyncio.Future[Any]] = [news, generation.failure]
        await asyncio.wait(waited, timeout=heartbeat_seconds, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()
        strained = hosted.relieve_memory()
        if strained is not None:
            say(strained.reason)
            await control.send(ProviderMessage(strained=strained))
        report, saved = hosted.report()
        await control.send(ProviderMessage(report=report))
        for checkpoint in saved:
            await control.send(ProviderMessage(saved=Saved(deployment=hosted.name, checkpoint=checkpoint)))
        if generation.failure.done() and hosted is slot.hosted and generation is hosted.generation:
            failure = generation.failure.result()
            message = Failed(
                deployment=hosted.name,
                kind=failure.kind,
                message=failure.text,
                microbatch=failure.microbatch,
                generation=generation.number,
                about=failure.about,
            )
            await control.send(ProviderMessage(failed=message))
            # The stage stays in the slot: after the failure of a neighbour, the coordinator may keep it.
            failed = generation
        await asyncio.sleep(MIN_REPORT_SECONDS)


async def print_progress(slot: StageSlot, say: Callable[[str], None]) -> None:
    """Tell the user from time to time how fast the stage trains, while it does. Runs forever."""
    told: HostedStage | None = None
    samples, since, pause = 0, time.monotonic(), _FIRST_PROGRESS_SECONDS
    while True:
        hosted = await slot.next_stage()
        if hosted is not told:
            told, samples = hosted, hosted.samples
            since, pause = time.monotonic(), _FIRST_PROGRESS_SECONDS
        await asyncio.sleep(pause)
        if hosted is slot.hosted and hosted.samples > samples:
            now = time.monotonic()
            rate = (hosted.samples - samples) / (now - since)
            say(f"training {rate:,.0f} samples/s, {hosted.samples:,} samples so far")
            samples, since, pause = hosted.samples, now, _PROGRESS_SECONDS

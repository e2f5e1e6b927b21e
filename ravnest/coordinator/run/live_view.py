"""Live view of a run: keeps the display, the summary and the trace up to date."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from ravnest.coordinator.run.context import RunContext
from ravnest.monitor.run_directory import RunDirectory

_DISPLAY_SECONDS: Final = 0.25
_WRITE_SECONDS: Final = 2.0


class LiveView:
    """The live view of one run. `run` ends when it is cancelled."""

    def __init__(
        self,
        context: RunContext,
        directory: RunDirectory,
        on_look: Callable[[], None],
        on_write: Callable[[], Awaitable[None]],
    ) -> None:
        """`on_look` is called before each update of the display, `on_write` with each update of the files."""
        self._context = context
        self._directory = directory
        self._on_look = on_look
        self._on_write = on_write

    async def run(self) -> None:
        seconds = 0.0
        while True:
            await asyncio.sleep(_DISPLAY_SECONDS)
            seconds += _DISPLAY_SECONDS
            self._on_look()
            self._context.display.show(self._context.progress.snapshot())
            if seconds >= _WRITE_SECONDS:
                seconds = 0.0
                with self._context.failing():
                    await self._write()

    async def _write(self) -> None:
        progress, recorder = self._context.progress, self._context.recorder
        progress.write(progress.summary("running", progress.activity), self._directory)
        if recorder.tracing is not None and recorder.tracing.due:
            await asyncio.to_thread(recorder.write_trace)
        await self._on_write()

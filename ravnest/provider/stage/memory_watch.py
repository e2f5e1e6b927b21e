"""Memory of a hosted stage: how much is left, and what to do when it runs short."""

import time
from collections.abc import Callable

import torch

from ravnest.provider.machine.memory import PROCESS_BYTES, spare_bytes, stage_bytes
from ravnest.provider.machine.memory_pressure import EASY, MemoryReading, MemoryStrain, ReliefStep
from ravnest.provider.stage.host import Host


class StageMemory:
    """Watches the memory of one generation of a stage."""

    def __init__(
        self,
        host: Host,
        recomputes: bool,
        free_bytes: Callable[[torch.device], int] = spare_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`recomputes`: the stage keeps no activations, or cannot let them go. `free_bytes` reads what a device has."""
        self._host = host
        self._free_bytes = free_bytes
        self._clock = clock
        self._strain = MemoryStrain(recomputes)

    def reading(self) -> MemoryReading:
        """The memory that the stage uses and has left now."""
        device = self._host.device
        process = 0 if device.type == "cuda" else PROCESS_BYTES
        used = stage_bytes(device, self._host.baseline_bytes)
        return MemoryReading(used, self._free_bytes(device), self._host.lent_bytes, process)

    def next_step(self, reading: MemoryReading, in_flight: int) -> ReliefStep | None:
        """The next step against memory pressure, if one is due; `in_flight` microbatches were held at once."""
        return self._strain.look(reading, in_flight, self._clock())

    def has_room(self, size_bytes: int) -> bool:
        """Whether main memory has plenty left after a copy of the stage's state is made."""
        if self._host.device.type == "cuda":
            return self._free_bytes(torch.device("cpu")) >= PROCESS_BYTES + 2 * size_bytes
        reading = self.reading()
        return reading.left_bytes >= size_bytes + EASY * reading.short_bytes

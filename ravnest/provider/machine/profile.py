"""Profile of this machine: what it lends, how fast it computes, and which share of its cores this provider takes."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from ravnest import units
from ravnest.cores import usable_cores
from ravnest.engine.speed.device_speed import Speed
from ravnest.engine.speed.pretended_pace import Pretence
from ravnest.net.v1.control_pb2 import JoinRequest
from ravnest.net.v1.control_pb2 import Speed as SpeedMessage
from ravnest.provider.machine.core_claims import CoreClaim
from ravnest.provider.machine.speed_cache import Setup, device_name, machine_speed, read_kept


@dataclass(frozen=True)
class OfferedMachine:
    """The machine as its owner lends it."""

    device: torch.device
    memory_bytes: int
    pretence: Pretence
    """The slower machine that this provider pretends to be, in tests and benchmarks."""
    claim: CoreClaim | None
    """The share of the machine's cores; None: all of them."""
    is_embedded: bool
    """Whether the coordinator runs on this machine too, and divides its cores."""


class MachineProfile:
    """Measures this machine once, and follows its share of the cores. Used on the network's loop."""

    def __init__(self, machine: OfferedMachine, say: Callable[[str], None]) -> None:
        """`say` prints lines for the user."""
        self._machine = machine
        self._say = say
        self._cores = min(usable_cores(), torch.get_num_threads())
        """Cores that the providers of this machine share: torch counts those that are worth a thread."""
        self._speed: Speed | None = None
        """The last measurement."""

    async def describe(self, request: JoinRequest) -> None:
        """Write into the request how fast this machine is. The first call measures it and tells the user."""
        machine = self._machine
        if self._speed is None and machine.claim is not None:
            _, said = self._take_share(machine.claim)
            if machine.claim.is_told:
                self._say(said)
            request.threads = request.threads and torch.get_num_threads()
        is_first = self._speed is None
        speed = self._speed = self._speed or await machine_speed(machine.device, machine.memory_bytes)
        self._write_speed(request, speed)
        request.device_name = device_name(machine.device)
        request.measures_link = not machine.is_embedded
        if is_first:
            memory = units.byte_size(machine.memory_bytes)
            rate = units.flops(speed.divided(machine.pretence.slower).flops_per_second)
            cores = units.counted(request.cores, "core")
            self._say(f"this machine: {machine.device}, {cores}, {memory}, {rate}")
            if said := machine.pretence.in_words:
                self._say(said)

    async def next_share(self, claim: CoreClaim, computes: bool) -> SpeedMessage | None:
        """Look for other providers on this machine; the message for the coordinator where the share of the cores has
        changed. `computes`: whether a stage computes here, so that the speed cannot be measured now."""
        before = torch.get_num_threads()
        changed, said = self._take_share(claim)
        if not changed or self._speed is None:
            return None
        self._say(said)
        self._speed = await self._speed_on_share(self._speed, before, computes)
        message = SpeedMessage(threads=torch.get_num_threads())
        self._write_speed(message, self._speed)
        return message

    def _take_share(self, claim: CoreClaim) -> tuple[bool, str]:
        """Compute with this provider's share of the cores from now on; whether it changed, and why it is that large."""
        threads, reason = claim.share(usable_cores() if claim.claim.cores else self._cores)
        changed = threads != torch.get_num_threads()
        if changed:
            torch.set_num_threads(threads)
        return changed, reason

    async def _speed_on_share(self, known: Speed, threads_before: int, computes: bool) -> Speed:
        """The speed with the present number of threads: cached, measured, or estimated while a stage computes."""
        cached = read_kept(Setup.here(self._machine.device))
        if cached is None and not computes:
            cached = await machine_speed(self._machine.device, self._machine.memory_bytes)
        return cached or known.divided(threads_before / torch.get_num_threads())

    def _write_speed(self, message: JoinRequest | SpeedMessage, measured: Speed) -> None:
        for name, figure in asdict(measured.divided(self._machine.pretence.slower)).items():
            setattr(message, name, figure)
        claim = self._machine.claim
        shares = claim is not None and claim.is_told and torch.get_num_threads() < self._cores
        message.cores = torch.get_num_threads() if shares else usable_cores()

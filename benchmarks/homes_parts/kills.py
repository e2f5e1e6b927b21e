"""Kills in a swarm of homes: each machine in turn, at drawn moments, and then all of them and the coordinator."""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.homes_parts.cases import Case
from benchmarks.homes_parts.recoveries import (
    Kill,
    PowerCut,
    clusters_of,
    holders,
    power_cut,
    recovery,
    stages_of,
    told_loss_seconds,
    told_seconds,
)
from benchmarks.homes_parts.swarm import HomesSwarm

_RECOVERY_SECONDS: Final = 600.0
_BACK_SECONDS: Final = 300.0
_STAGE_SECONDS: Final = 60.0
_FINISH_SECONDS: Final = 900.0
_PAUSE_SECONDS: Final = (15.0, 45.0)
"""Shortest and longest time of undisturbed training before a kill."""


@dataclass(frozen=True, slots=True)
class Killed:
    """Everything that one swarm went through."""

    kills: tuple[Kill, ...]
    unrecovered: str
    """Reason why the swarm could not be used any more; empty if it recovered each time."""
    power_cut: PowerCut | None
    finish_seconds: float | None
    ledger: dict[str, int]

    @property
    def is_complete(self) -> bool:
        """Whether the run finished with each microbatch applied exactly once."""
        ledger = self.ledger
        return (
            self.finish_seconds is not None
            and ledger["fed"] == ledger["completed"]
            and ledger["lost"] == ledger["applied_twice"] == 0
        )


def kill_all_in_turn(case: Case, folder: Path, seed: int, machines: int | None, say: Callable[[str], None]) -> Killed:
    """Kill this many machines (None: each) one after the other, then all at once. RuntimeError, TimeoutError: the swarm
    never trained."""
    chance = random.Random(f"kills {case.name} {seed}")
    kills: list[Kill] = []
    cut: PowerCut | None = None
    finished: float | None = None
    unrecovered = ""
    with HomesSwarm(folder, case.population, case.model) as swarm:
        swarm.wait_for_training()
        try:
            for name in chance.sample(swarm.names, len(swarm.names)):
                if machines is not None and len(kills) >= machines:
                    break
                swarm.pass_time(chance.uniform(*_PAUSE_SECONDS))
                if not _gets_stage(swarm, name):
                    say(f"{case.name}: {name} holds no stage and is not killed")
                    continue
                kills.append(_kill(swarm, name))
                say(f"{case.name}: {kills[-1]}")
                _bring_back(swarm, name)
            swarm.pass_time(chance.uniform(*_PAUSE_SECONDS))
            cut = _kill_everything(swarm)
            say(f"{case.name}: {cut}")
            swarm.pass_time(_PAUSE_SECONDS[0])
            finished = swarm.finish(_FINISH_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            unrecovered = str(error)
            say(f"{case.name}: {unrecovered}")
        return Killed(tuple(kills), unrecovered, cut, finished, swarm.summary().get("ledger", {}))


def _kill(swarm: HomesSwarm, name: str) -> Kill:
    told = told_seconds(swarm.summary())
    at = swarm.kill(name)
    found: list[Kill] = []

    def is_recovered() -> bool:
        events, updates = swarm.watch.events(), swarm.watch.updates(at)
        found.extend(filter(None, [recovery(name, at, events, updates, swarm.summary(), told)]))
        return bool(found)

    swarm.wait(is_recovered, _RECOVERY_SECONDS, f"update of every stage after {name} was killed")
    return found[0]


def _gets_stage(swarm: HomesSwarm, name: str) -> bool:
    """Whether a machine holds a stage, or gets one soon: a machine that is back may wait for the next deployment."""
    try:
        swarm.wait(lambda: name in holders(_clusters(swarm)), _STAGE_SECONDS, f"stage of {name}")
    except TimeoutError:
        return False
    return True


def _clusters(swarm: HomesSwarm) -> list[Mapping[str, Any]]:
    return clusters_of(swarm.summary(), swarm.watch.events())


def _bring_back(swarm: HomesSwarm, name: str) -> None:
    """Start a killed machine again, and wait until it has joined and all stages train."""
    since = time.time()
    swarm.join(name)

    def is_back() -> bool:
        joined = swarm.watch.events(since, "joined", "reconnected")
        trained = {(line["cluster"], line["stage"]) for line in swarm.watch.updates(since)}
        return any(event.get("provider") == name for event in joined) and trained >= stages_of(_clusters(swarm))

    swarm.wait(is_back, _BACK_SECONDS, f"training after {name} joined again")


def _kill_everything(swarm: HomesSwarm) -> PowerCut:
    told = told_loss_seconds(swarm.summary())
    killed_at = swarm.kill(swarm.requester, *swarm.names)
    restarted_at = time.time()
    swarm.resume()
    for name in swarm.names:
        swarm.join(name)
    found: list[PowerCut] = []

    def goes_on() -> bool:
        losses: list[dict[str, Any]] = [line for line in swarm.watch.metrics() if line["kind"] == "train"]
        events = swarm.watch.events(restarted_at)
        found.extend(filter(None, [power_cut(killed_at, restarted_at, events, losses, told)]))
        return bool(found)

    swarm.wait(goes_on, _RECOVERY_SECONDS, "microbatch after all machines were started again")
    return found[0]

"""An embedded swarm in which one provider lies: real processes, and real lines between them."""

from pathlib import Path
from typing import Any

from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from ravnest.monitor.events import read_events
from tests.swarms.embedded import impostor


def lying_swarm(providers: int, liar: str, lie: str, first: int = 0) -> EmbeddedSwarm:
    """Providers of which one tells this lie, from a microbatch on."""
    program = Path(__file__).with_name("lying_neighbour.py")
    start = impostor(liar, program, RAVNEST_LIE=lie, RAVNEST_LIE_FROM=str(first))
    return EmbeddedSwarm(providers, start=start)


def events(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """The events of these kinds that a run has told."""
    return [event for event in read_events(run / "events.jsonl") if event["kind"] in kinds]

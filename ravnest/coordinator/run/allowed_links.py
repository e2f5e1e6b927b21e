"""Links of a deployment that the coordinator's relay may forward."""

from collections.abc import Sequence

from ravnest.coordinator.run.context import RunContext
from ravnest.coordinator.run.orders import LinkOrder
from ravnest.coordinator.swarm.own_line import RELAYED_STATE


class AllowedLinks:
    """The links of one deployment, grouped by purpose. Each new link is an event `linked`."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._by_purpose: dict[str, tuple[LinkOrder, ...]] = {}

    def allow(self, purpose: str, links: Sequence[LinkOrder]) -> None:
        """Lets the relay forward these links, in place of the earlier ones for the same purpose."""
        known = {link.name for of_purpose in self._by_purpose.values() for link in of_purpose}
        self._by_purpose[purpose] = tuple(links)
        allowed = [link for of_purpose in self._by_purpose.values() for link in of_purpose]
        state = {
            link.name: RELAYED_STATE[purpose.split()[0]]
            for purpose, of_purpose in self._by_purpose.items()
            for link in of_purpose
            if purpose.split()[0] in RELAYED_STATE
        }
        nodes = {link.name: frozenset((link.before, link.after)) for link in allowed}
        self._context.swarm.allow_relays(nodes, state)
        for link in links:
            if link.name not in known:
                self._context.emit("linked", f"{link.before} to {link.after}: {link.reason}", link=link.name)

"""The coordinator's own line, and the lines of those who receive state: rates at which state may be sent.

The coordinator serves artifacts and relays links while it feeds the run, so its state keeps to a budget too. Several
senders may send state to one receiver; each then gets its share of the receiver's line.
"""

import ipaddress
from typing import Final

from ravnest.net.address import is_nearby, own_addresses
from ravnest.net.pacing.budget import StateBudget
from ravnest.net.pacing.foreground import Foreground
from ravnest.net.pacing.line_rate import MeasuredRate
from ravnest.net.pacing.state_rate import StateKind

RECEIVER_SHARE: Final = 0.5
"""Largest share of a receiver's line that all senders of state together may take: activations and gradients arrive on
the same line."""
_MAX_LINE_RATE: Final = 1.25e9
"""Rate of the fastest line that is believed, in bytes per second."""

RELAYED_STATE: Final[dict[str, StateKind]] = {"replica": "replica", "rings": "round"}
"""Kinds of state on relayed links, by the purpose of the link. Links between stages and to a stage that waits for its
part are not held back."""


def receiver_limit(line_bytes_per_second: float | None, senders: int) -> float:
    """Bytes per second that each of several senders may send to one receiver; 0: its line is not known."""
    if not line_bytes_per_second:
        return 0.0
    return RECEIVER_SHARE * line_bytes_per_second / max(1, senders)


class OwnLine:
    """The coordinator's line, learned from the measurements of its providers. Used on the network's loop."""

    def __init__(self, budget: StateBudget) -> None:
        self.budget = budget
        self._down = MeasuredRate()

    @property
    def down_bytes_per_second(self) -> float:
        """Rate of the downlink; 0 while it is not known."""
        return self._down.bytes_per_second

    def measured(self, host: str, up_bytes_per_second: float, down_bytes_per_second: float) -> None:
        """A provider on this host has measured its connection to the coordinator: `up` is towards the coordinator.

        The coordinator's line is at least as fast as the fastest connection. Providers on its own machine tell nothing
        about it, and those on its network only while there are no others.
        """
        if is_own_host(host):
            return
        nearby, _ = is_nearby(host, own_addresses(host))
        self.budget.measured(min(down_bytes_per_second, _MAX_LINE_RATE), is_nearby=nearby)
        self._down.measured(min(up_bytes_per_second, _MAX_LINE_RATE), is_nearby=nearby)

    def foreground(self, host: str) -> Foreground:
        """The counter of the work that is sent to a provider on this host."""
        return self.budget.nearby if is_nearby(host, own_addresses(host))[0] else self.budget


def is_own_host(host: str) -> bool:
    """Whether this is the coordinator's own machine: other machines cannot connect from its loopback."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"

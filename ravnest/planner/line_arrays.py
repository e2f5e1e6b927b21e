"""Lines between many pairs of providers at once, as arrays: `Network.line` for thousands of pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ravnest.planner.model_costs import Table
from ravnest.planner.problem import RELAY_SECONDS, Network, Provider

Indices = np.ndarray[Any, np.dtype[np.int64]]
"""Positions of providers in the sequence that the arrays were made from."""

Flags = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, eq=False)
class LineArrays:
    """The network figures of providers, and the measured lines between them."""

    up: Table
    """Bytes per second, as are `down` and `relay`."""
    down: Table
    latency: Table
    hidden: Flags
    """Providers that other machines cannot dial."""
    machine: Indices
    """The same number for providers on one machine, which have no line between them."""
    relay: float
    """Rate of a line through the coordinator."""
    senders: Indices
    """Senders of the measured lines, sorted by sender and receiver."""
    receivers: Indices
    rates: Table
    latencies: Table

    @classmethod
    def of(cls, network: Network, providers: Sequence[Provider]) -> Self:
        index = {p.name: i for i, p in enumerate(providers)}
        machines = {name: i for i, name in enumerate(dict.fromkeys(p.machine for p in providers))}
        measured = sorted(
            (index[sender], index[receiver], line.bytes_per_second, line.latency_seconds)
            for (sender, receiver), line in network.measured.items()
            if sender in index and receiver in index
        )
        return cls(
            up=np.array([p.up_bytes_per_second for p in providers], float),
            down=np.array([p.down_bytes_per_second for p in providers], float),
            latency=np.array([p.latency_seconds for p in providers], float),
            hidden=np.array([not p.reachable for p in providers], bool),
            machine=np.array([machines[p.machine] for p in providers], np.int64),
            relay=min(network.requester.up_bytes_per_second, network.requester.down_bytes_per_second),
            senders=np.array([line[0] for line in measured], np.int64),
            receivers=np.array([line[1] for line in measured], np.int64),
            rates=np.array([line[2] for line in measured], float),
            latencies=np.array([line[3] for line in measured], float),
        )

    @property
    def slower_way(self) -> Table:
        """For each provider, the rate that its own line carries both ways."""
        return np.minimum(self.up, self.down)

    @property
    def some_share_a_machine(self) -> bool:
        return len(np.unique(self.machine)) < len(self.machine)

    def relayed(self, one: Indices, other: Indices) -> Flags:
        """Whether the coordinator relays between the providers of each pair."""
        relayed: Flags = self.hidden[one] & self.hidden[other] & (self.machine[one] != self.machine[other])
        return relayed

    def between(self, sender: Indices, receiver: Indices) -> tuple[Table, Table]:
        """Bytes per second and seconds of the line of each pair."""
        rate = self._unmeasured_rates(sender, receiver)
        latency = self.latency[sender] + self.latency[receiver]
        latency = np.where(self.hidden[sender] & self.hidden[receiver], latency + RELAY_SECONDS, latency)
        if len(self.senders):
            keys, wanted = self.senders * len(self.up) + self.receivers, sender * len(self.up) + receiver
            at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            known = keys[at] == wanted
            rate, latency = np.where(known, self.rates[at], rate), np.where(known, self.latencies[at], latency)
        same = self.machine[sender] == self.machine[receiver]
        return np.where(same, np.inf, rate), np.where(same, 0.0, latency)

    def among(self, members: Indices) -> Table:
        """Bytes per second of the line from each of these providers to each other one."""
        rates = self._unmeasured_rates(members[:, None], members[None, :])
        position = np.full(len(self.up), -1)
        position[members] = np.arange(len(members))
        row, column = position[self.senders], position[self.receivers]
        known = (row >= 0) & (column >= 0)
        rates[row[known], column[known]] = self.rates[known]
        machine = self.machine[members]
        rates[machine[:, None] == machine[None, :]] = np.inf
        return rates

    def any_measured(self, members: Indices) -> bool:
        """Whether a line between two of these providers was measured."""
        return bool((np.isin(self.senders, members) & np.isin(self.receivers, members)).any())

    def _unmeasured_rates(self, sender: Indices, receiver: Indices) -> Table:
        rate = np.minimum(self.up[sender], self.down[receiver])
        return np.where(self.hidden[sender] & self.hidden[receiver], np.minimum(rate, self.relay), rate)

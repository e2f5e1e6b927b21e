"""Providers that get no stage although they are connected: those that leave, and those that failed or broke the rules.

An exclusion ends with the provider's session: a provider that joins again may be well, or may want to stay.
"""

from collections.abc import Mapping


class Exclusions:
    """The exclusions of one run."""

    def __init__(self) -> None:
        self._leaving: set[str] = set()
        self._failed: dict[str, str] = {}
        """By provider, why it gets no stage."""

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._leaving or node_id in self._failed

    @property
    def nodes(self) -> set[str]:
        return self._leaving | self._failed.keys()

    @property
    def failed(self) -> Mapping[str, str]:
        """The providers that failed, each with the reason."""
        return self._failed

    def leave(self, node_id: str) -> None:
        """The provider wants to leave."""
        self._leaving.add(node_id)

    def fail(self, node_id: str, why: str) -> None:
        """The provider failed too often, or broke the rules."""
        self._failed[node_id] = why

    def forgive(self, node_id: str) -> None:
        """The provider gets stages again, unless it wants to leave."""
        self._failed.pop(node_id, None)

    def forget(self, node_id: str) -> None:
        """The provider's session has ended."""
        self._leaving.discard(node_id)
        self.forgive(node_id)

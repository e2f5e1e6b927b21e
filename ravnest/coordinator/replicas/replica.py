"""Complete replica of a cluster's state: where its parts are, and which bytes each provider has.

The part of a stage exists in up to two forms: as its owner has it, and rounded, as the holder decoded it from what a
slow line carried. A provider that fetched a part has the form of its source.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from ravnest.coordinator.feed.ledger import DataPosition


@dataclass(frozen=True, slots=True)
class Replica:
    """A complete replica: the stages of one cluster after the same microbatch."""

    number: int
    """The number of that microbatch plus one."""
    place: DataPosition
    nodes: tuple[frozenset[str], ...]
    """For each stage, the providers that have its part."""
    hashes: tuple[str, ...] = ()
    """For each stage, the sha256 of its part as its owner reported it; empty when it did not."""
    rounded: tuple[tuple[frozenset[str], str], ...] = ()
    """For each stage, the providers with the rounded part, and its sha256; empty if no part is rounded."""
    sizes_bytes: tuple[int, ...] = ()
    """For each stage, the size of its part."""
    announced_at: float = 0.0
    """When it was announced, on the clock `time.monotonic`."""

    def sha256(self, stage: int, node: str = "") -> str:
        """The sha256 of the part of a stage that this provider has; empty when it is not known."""
        nodes, sha256 = self._rounded(stage)
        if node in nodes:
            return sha256
        return self.hashes[stage] if stage < len(self.hashes) else ""

    def with_part(self, stage: int, node: str, sha256_start: str) -> "Replica":
        """The same replica, where this provider has a part of the stage whose sha256 begins so (empty: not known). A
        part that is not one of the recorded ones does not count."""
        own, (nodes, sha256) = self.sha256(stage), self._rounded(stage)
        # Without the hash, it is not known which form the provider has.
        is_rounded = bool(sha256) and bool(sha256_start) and sha256.startswith(sha256_start)
        is_own = not own or (own.startswith(sha256_start) if sha256_start else not sha256)
        if not is_rounded and not is_own:
            return self
        rounded = self.rounded
        if sha256:
            nodes = nodes | {node} if is_rounded else nodes - {node}
            rounded = (*rounded[:stage], (nodes, sha256), *rounded[stage + 1 :])
        has_part = (*self.nodes[:stage], self.nodes[stage] | {node}, *self.nodes[stage + 1 :])
        return replace(self, nodes=has_part, rounded=rounded)

    def is_available(self, present: Collection[str]) -> bool:
        """Whether, for every stage, a provider that is present has the part."""
        return all(not nodes.isdisjoint(present) for nodes in self.nodes)

    def _rounded(self, stage: int) -> tuple[frozenset[str], str]:
        return self.rounded[stage] if stage < len(self.rounded) else (frozenset(), "")

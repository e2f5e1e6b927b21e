"""Check of the number of clusters that a requester asks for; it needs no torch, so that it can come first."""

from ravnest.errors import PlanError
from ravnest.units import counted


def check_clusters(providers: int | None, clusters: int | None) -> None:
    """PlanError if the known number of providers cannot form this number of clusters."""
    if clusters is None:
        return
    if isinstance(clusters, bool) or not isinstance(clusters, int) or clusters < 1:
        raise PlanError(f"clusters is {clusters!r}: give a whole number of at least 1")
    # An invalid number of providers is reported where they are started.
    if isinstance(providers, int) and 0 < providers < clusters:
        raise PlanError(
            f"{counted(clusters, 'cluster')} cannot be made of {counted(providers, 'provider')}, as each needs at "
            f"least one: use --providers {clusters} or more, or --clusters {providers} or fewer"
        )

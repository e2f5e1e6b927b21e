"""Stage figures: what the summary and the display say about each stage, from its provider's last report."""

from collections.abc import Mapping, Sequence

from ravnest.monitor.summary import LinkSummary, StageSummary, Staleness
from ravnest.net.v1.control_pb2 import Report
from ravnest.planner.plan import StagePlan

_MAX_LISTED = 6
"""Providers whose shares are listed one by one; of more, only the slowest are."""


def stage_summary(stage: StagePlan, stages: Sequence[StagePlan], report: Report, device: str) -> StageSummary:
    """The summary of one of the plan's stages."""
    updates = report.updates
    return StageSummary(
        provider=stage.node,
        stage=stage.stage,
        role=stage.role,
        device=device,
        parameters=stage.parameters,
        peak_memory_bytes=report.peak_memory_bytes,
        baseline_memory_bytes=report.baseline_memory_bytes,
        busy_fraction=_busy_fraction(report),
        updates=updates,
        staleness=Staleness(
            mean=report.staleness_sum / updates if updates else 0.0,
            p95=_percentile_95(report.staleness_counts),
            max=report.staleness_max,
        ),
        bytes_sent=report.bytes_sent,
        bytes_received=report.bytes_received,
        links=tuple(
            LinkSummary(
                to=link.node,
                route=link.route,
                connections=link.connections,
                bytes_sent=link.bytes_sent,
                bytes_received=link.bytes_received,
                bytes_raw=link.raw_bytes_sent,
                codec=_link_codec(stage, stages, is_next=link.next),
                delay_seconds=link.delay_seconds or None,
            )
            for link in report.links
        ),
    )


def shares_in_words(shares: Mapping[str, float]) -> str:
    """How much of its stage each provider has fetched, like "anna 43 %, ben 100 %".

    For many providers, it says how many have everything, and names the slowest of the others.
    """
    if len(shares) <= _MAX_LISTED:
        return ", ".join(f"{node} {int(100 * share)} %" for node, share in shares.items())
    left = sorted((share, node) for node, share in shares.items() if share < 1)
    slowest = ", ".join(f"{node} {int(100 * share)} %" for share, node in left[: _MAX_LISTED // 2])
    return f"{len(shares) - len(left)} of {len(shares)}" + (f", {slowest}" if slowest else "")


def _link_codec(stage: StagePlan, stages: Sequence[StagePlan], *, is_next: bool) -> str:
    """The codec of the link to the next stage, or to the previous one. The stage next to a leaf that looks rows up is
    the root."""
    own = {other.stage: other for other in stages if other.cluster == stage.cluster}
    after = own.get((stage.stage + is_next) % max(1, len(own)))
    return "float32" if after is None else after.codec


def _busy_fraction(report: Report) -> float:
    """The share of the time with a full pipeline in which the stage computed; before that, of all its time."""
    if report.training_seconds > 0:
        return report.training_busy_seconds / report.training_seconds
    return report.busy_seconds / report.seconds if report.seconds else 0.0


def _percentile_95(counts: Sequence[int]) -> float:
    """The smallest staleness that 95 % of the updates do not exceed."""
    passed, total = 0, sum(counts)
    for value, count in enumerate(counts):
        passed += count
        if total and passed >= 0.95 * total:
            return float(value)
    return 0.0

"""Rows of the table and targets of a run on home lines, next to the same run without state."""

from statistics import fmean
from typing import Final

from benchmarks.homes_parts.reading import HomesRun, state_bytes
from benchmarks.report import Row, Target

_OF_PREDICTED: Final = 0.9
_OF_NO_STATE: Final = 0.95
_LATEST_ROUND: Final = 1.25
_GB: Final = 1e9


def run_row(case: str, run: HomesRun, without: HomesRun | None) -> Row:
    """The row of a run; `without` is the same run without state, None for that run itself."""
    between = max(traffic.between_stages for traffic in run.traffic.values())
    row: dict[str, object] = {
        "case": case,
        "stages": " + ".join(map(str, run.stages)),
        "samples_per_second": run.samples_per_second,
        "of_predicted": run.of_predicted,
        "of_no_state": None if without is None else run.samples_per_second / without.samples_per_second,
        "lost": run.lost,
        "replicas": _of_which(run.replicas, run.replicas_failed, "failed"),
        "rounds": _of_which(len(run.rounds), run.rounds_skipped, "skipped"),
        "latest_round": run.latest_round,
        "checkpoint_seconds": fmean(run.checkpoint_seconds) if run.checkpoint_seconds else None,
        "finish_seconds": run.finish_seconds,
        "pause_ms": None if run.longest_pause_seconds is None else 1e3 * run.longest_pause_seconds,
        "stages_gb_h": between / _GB,
    }
    if without is not None:
        state = state_per_hour(run, without)
        row["state_gb_h"] = max(state.values()) / _GB
        row["machines"] = [
            {
                "machine": name,
                "state_bytes_per_hour": state[name],
                "between_stages_bytes_per_hour": traffic.between_stages,
                "sent_bytes_per_hour": traffic.sent,
                "received_bytes_per_hour": traffic.received,
            }
            for name, traffic in run.traffic.items()
        ]
    row["figures"] = {
        "predicted_samples_per_second": run.predicted_samples_per_second,
        "suspected": run.suspected,
        "replicas": run.replicas,
        "replicas_failed": run.replicas_failed,
        "rounds": [{"told_seconds": each.told_seconds, "seconds": each.seconds} for each in run.rounds],
        "rounds_skipped": run.rounds_skipped,
        "checkpoint_seconds": list(run.checkpoint_seconds),
        "ledger": dict(run.ledger),
    }
    return row


def _of_which(number: int, exceptions: int, word: str) -> str:
    return f"{number} ({exceptions} {word})" if exceptions else str(number)


def run_targets(name: str, run: HomesRun, without: HomesRun) -> list[Target]:
    """The targets of a run that nothing disturbed."""
    targets = [
        Target(f"{name}: samples/s of predicted", run.of_predicted, _OF_PREDICTED),
        Target(f"{name}: samples/s of no state", run.samples_per_second / without.samples_per_second, _OF_NO_STATE),
        Target(f"{name}: providers lost", float(run.lost), 0.0, at_most=True),
        Target(f"{name}: replicas failed", float(run.replicas_failed), 0.0, at_most=True),
        Target(f"{name}: finished", float(run.finish_seconds is not None), 1.0),
    ]
    if run.latest_round is not None:
        targets.append(Target(f"{name}: latest round of predicted", run.latest_round, _LATEST_ROUND, at_most=True))
    return targets


def state_per_hour(run: HomesRun, without: HomesRun) -> dict[str, float]:
    """Bytes of state that each machine sends per hour."""
    return {name: state_bytes(traffic, without.traffic[name]) for name, traffic in run.traffic.items()}

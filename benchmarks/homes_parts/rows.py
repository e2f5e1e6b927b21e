"""Rows of the table and targets of a run on home lines, next to the same run without state."""

from collections.abc import Mapping
from dataclasses import asdict
from statistics import fmean, median
from typing import Final

from benchmarks.homes_parts.kills import Killed
from benchmarks.homes_parts.peers import Curve, common_loss, seconds_to, smoothed
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
        "of_no_state": None if without is None else run.of(without),
        "lost": run.lost,
        "replicas": _of_which(run.replicas, run.replicas_failed, "failed"),
        "rounds": _of_which(len(run.rounds), run.rounds_skipped, "skipped"),
        "latest_round": run.latest_round,
        "checkpoint_seconds": fmean(run.checkpoint_seconds) if run.checkpoint_seconds else None,
        "finish_seconds": run.finish_seconds,
        "idle": round(run.idle_share, 2),
        "stages_gb_h": between / _GB,
    }
    if run.longest_pause_seconds is not None:
        row["pause_ms"] = 1e3 * run.longest_pause_seconds
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
        Target(f"{name}: samples/s of no state", run.of(without), _OF_NO_STATE),
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


def kill_rows(case: str, killed: Killed) -> list[Row]:
    """A row for all kills of single machines, and one for that of all machines at once."""
    kills = killed.kills
    rows: list[Row] = [
        {
            "case": f"{case}: kills",
            "kills": len(kills),
            "median_seconds": median(kill.seconds for kill in kills) if kills else None,
            "worst_seconds": max((kill.seconds for kill in kills), default=None),
            "told_seconds": max((kill.told_seconds for kill in kills if kill.told_seconds is not None), default=None),
            "unrecovered": killed.unrecovered[:60],
            "finish_seconds": killed.finish_seconds,
            "each": [asdict(kill) for kill in kills],
            "ledger": killed.ledger,
        }
    ]
    if killed.power_cut is not None:
        cut = killed.power_cut
        rows.append(
            {
                "case": f"{case}: power cut",
                "worst_seconds": cut.seconds,
                "source": cut.source,
                "samples_lost": cut.samples_lost,
                "lost_seconds": cut.lost_seconds,
                "told_seconds": cut.told_seconds,
                "figures": asdict(cut),
            }
        )
    return rows


def kill_targets(case: str, killed: Killed) -> list[Target]:
    """Targets of a swarm whose machines were killed. A time has a target where the run tells one."""
    targets = [
        Target(f"{case}: swarms that did not recover", float(bool(killed.unrecovered)), 0.0, at_most=True),
        Target(f"{case}: finished, each microbatch applied once", float(killed.is_complete), 1.0),
    ]
    told = [kill.seconds / kill.told_seconds for kill in killed.kills if kill.told_seconds]
    if told:
        targets.append(Target(f"{case}: seconds after a kill of told, median", median(told), 1.0, at_most=True))
        targets.append(Target(f"{case}: seconds after a kill of told, worst", max(told), 1.0, at_most=True))
    if killed.power_cut is not None and killed.power_cut.told_seconds:
        of_told = killed.power_cut.lost_seconds / killed.power_cut.told_seconds
        targets.append(Target(f"{case}: work lost by a power cut of told", of_told, 1.0, at_most=True))
    return targets


def peer_rows(case: str, curves: Mapping[str, Curve]) -> list[Row]:
    """A row for each contender, with the time until the lowest loss that all of them have reached."""
    enough = [curve.points for curve in curves.values() if smoothed(curve.points)]
    goal = common_loss(enough) if enough else None
    return [
        {
            "case": f"{case}: {name}",
            "samples_per_second": curve.samples_per_second,
            "averagings": curve.averagings,
            "loss_of_all": goal,
            "seconds_to_it": None if goal is None else seconds_to(curve.points, goal),
            "lowest_loss": min((mean for _, mean in smoothed(curve.points)), default=None),
            "seconds": curve.points[-1][0] if curve.points else None,
        }
        for name, curve in curves.items()
    ]

"""Synthetic traces of pipelines, on a clock that advances by the period of a microbatch."""

from ravnest.monitor.trace import TraceSpan, TraceStage

FORWARD, BACKWARD, UPDATE = 0.3, 0.4, 0.1
"""Shares of each period; for the rest of it a stage waits."""


def pipeline(stages: int = 2, microbatches: int = 30, first: int = 0, period: float = 0.1) -> list[TraceStage]:
    """A cluster whose stages do one forward and one backward per period; later stages have fewer in flight."""
    return [_stage(number, stages, microbatches, first, period) for number in range(stages)]


def _stage(number: int, stages: int, microbatches: int, first: int, period: float) -> TraceStage:
    in_flight = stages - number
    spans = []

    def add(kind: str, microbatch: int, began: float, length: float, detail: str = "") -> None:
        spans.append(TraceSpan(kind, first + microbatch, began * period, (began + length) * period, detail))

    for tick in range(microbatches + in_flight):
        began = float(tick + number)
        if tick < microbatches:
            add("forward", tick, began, FORWARD)
            if number < stages - 1:
                add("send", tick, began + FORWARD, 0.2, "forward")
            if number:
                add("receive", tick, began - 0.1, 0.05, "forward")
        back = tick - in_flight
        if 0 <= back < microbatches:
            add("backward", back, began + FORWARD, BACKWARD)
            add("update", back, began + FORWARD + BACKWARD, UPDATE)
        busy = FORWARD + BACKWARD + UPDATE
        if 0 <= tick - 1 < microbatches and tick < microbatches:
            add("wait", tick, began - (1 - busy), 1 - busy, "nothing ready" if number else "limit")
    role = "root" if not number else "leaf" if number == stages - 1 else "stem"
    return TraceStage(0, number, role, f"provider-{number}", tuple(spans))

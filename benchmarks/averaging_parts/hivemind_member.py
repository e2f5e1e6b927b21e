"""Member process of hivemind's averager in benchmarks.averaging, started with an interpreter that has hivemind.

Only the all-reduce is measured: members find their group before they say that they are ready.
"""

import os
import time
from typing import Any

import torch

from benchmarks.averaging_parts.member import base_values, check_mean, meet, my_place, serve

_LOOK_SECONDS = 0.02
_GROUP_SECONDS = 20.0
"""Timeout for finding a group, which often fails."""
_REDUCE_SECONDS = 60.0


def main() -> None:
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "ERROR")
    import hivemind  # type: ignore[import-not-found,unused-ignore]
    from hivemind.averaging.control import AveragingStage  # type: ignore[import-not-found,unused-ignore]

    place = my_place()
    options = {"host_maddrs": [f"/ip4/{place.host}/tcp/0"], "start": True, "use_relay": False, "auto_nat": False}
    dht = hivemind.DHT(**options) if place.index == 0 else None
    first = meet(str(dht.get_visible_maddrs()[0]) if dht is not None else "")[0]
    if dht is None:
        dht = hivemind.DHT(initial_peers=[first], **options)
    base = base_values(place)
    tensor = torch.empty_like(base)
    averager = hivemind.DecentralizedAverager(
        [tensor],
        dht=dht,
        prefix="benchmark",
        target_group_size=place.count,
        min_group_size=place.count,
        min_matchmaking_time=3.0,
        request_timeout=2.0,
        allreduce_timeout=_REDUCE_SECONDS,
        start=True,
    )

    def prepare() -> Any:
        with averager.get_tensors() as tensors:
            tensors[0].copy_(base * (place.index + 1))
        # This timeout covers the averaging as well, and there is no separate one for finding a group.
        control = averager.step(wait=False, require_trigger=True, timeout=_GROUP_SECONDS + _REDUCE_SECONDS)
        until = time.monotonic() + _GROUP_SECONDS
        # The averager is a process of its own, whose state has to be polled in shared memory.
        while control.stage is AveragingStage.LOOKING_FOR_GROUP or control.stage is AveragingStage.IDLE:
            if control.done() or time.monotonic() > until:
                control.cancel()
                return None
            time.sleep(_LOOK_SECONDS)
        return control

    def average(control: Any) -> torch.Tensor:
        if control is None:
            raise TimeoutError(f"no group in {_GROUP_SECONDS:g} s")
        control.allow_allreduce()
        control.result(_REDUCE_SECONDS)
        with averager.get_tensors() as tensors:
            mean: torch.Tensor = tensors[0].clone()
        return mean

    serve(prepare, average, lambda mean: check_mean(mean, base, place.mean_factor, 1e-5))
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()

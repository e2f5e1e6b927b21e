"""A member of hivemind's averager, as benchmarks.averaging starts it, with an interpreter that has hivemind.

Only the all-reduce counts: members have found their group before they say that they are ready.
"""

import os
import time
from typing import Any

import torch

from benchmarks.averaging_parts.member import base_values, check_mean, meet, my_place, serve

_LOOK_SECONDS = 0.02
_GROUP_SECONDS = 60.0


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
        allreduce_timeout=120.0,
        start=True,
    )

    def prepare() -> Any:
        with averager.get_tensors() as tensors:
            tensors[0].copy_(base * (place.index + 1))
        control = averager.step(wait=False, require_trigger=True, timeout=_GROUP_SECONDS)
        # The averager is a process of its own and tells of its state in shared memory alone, so one has to look.
        while control.stage is AveragingStage.LOOKING_FOR_GROUP or control.stage is AveragingStage.IDLE:
            if control.done():
                break
            time.sleep(_LOOK_SECONDS)
        return control

    def average(control: Any) -> torch.Tensor:
        control.allow_allreduce()
        control.result()
        with averager.get_tensors() as tensors:
            mean: torch.Tensor = tensors[0].clone()
        return mean

    serve(prepare, average, lambda mean: check_mean(mean, base, place.mean_factor, 1e-5))
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()

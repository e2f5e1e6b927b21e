"""Member process of gloo's `all_reduce` in benchmarks.averaging; its argument `extra` is the network interface."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.averaging_parts.member import base_values, check_mean, meet, my_place, serve


def main() -> None:
    place = my_place()
    os.environ["GLOO_SOCKET_IFNAME"] = place.extra
    meet("")
    meeting = Path(place.folder, "gloo").absolute().as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=place.index, world_size=place.count)
    base = base_values(place)

    def average(values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values)
        return values

    def check(summed: torch.Tensor) -> None:
        check_mean(summed, base, place.mean_factor * place.count, 1e-5)

    serve(lambda: base * (place.index + 1), average, check)


if __name__ == "__main__":
    main()

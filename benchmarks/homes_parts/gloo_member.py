"""Member process that trains as in DiLoCo over gloo: inner steps of its own, then an all-reduce of the differences.

The outer optimizer is SGD with Nesterov momentum 0.9 and rate 0.7, as in the paper (Douillard et al., 2023).
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.homes_parts.peer_member import adamw, build, my_place, train

_OUTER_RATE, _OUTER_MOMENTUM = 0.7, 0.9


def main() -> None:
    place = my_place()
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    meeting = Path(place.folder, "gloo").absolute().as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=place.index, world_size=place.count)
    model, parameters = build(place)
    inner = adamw(parameters, place.slower)
    shared = [parameter.detach().clone() for parameter in parameters]
    outer = torch.optim.SGD(shared, lr=_OUTER_RATE, momentum=_OUTER_MOMENTUM, nesterov=True)
    steps = 0

    def step() -> None:
        nonlocal steps
        inner.step()
        steps += 1
        if steps % place.inner_steps == 0:
            average()

    @torch.no_grad()
    def average() -> None:
        for parameter, base in zip(parameters, shared, strict=True):
            base.grad = (base - parameter) / place.count
            dist.all_reduce(base.grad)
        outer.step()
        for parameter, base in zip(parameters, shared, strict=True):
            parameter.copy_(base)

    train(place, model, step, lambda: steps // place.inner_steps)


if __name__ == "__main__":
    main()

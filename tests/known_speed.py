"""A machine whose speed is known, as it is wherever one has joined before: measuring it takes seconds of a core.

A provider keeps what it has measured on its disk, and does not where others kept the processor busy meanwhile, which
is always so while tests run: then every join of a machine whose disk is a test's own would measure anew. Tests of the
measuring itself are in tests/provider/machine/test_machine_speed.py.
"""

from functools import cache
from pathlib import Path

import psutil
import pytest
import torch

from ravnest.engine.speed.device_speed import Speed, measure_speed
from ravnest.provider.machine.speed_cache import Setup, keep

_CPU = torch.device("cpu")


def speed_is_known(cache_home: Path) -> None:
    """Providers that keep what they know below this folder (XDG_CACHE_HOME), and compute with one thread, need not
    measure."""
    setup, speed = _known()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache_home))
        keep(setup, speed)


@cache
def _known() -> tuple[Setup, Speed]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Setup.here(_CPU), measure_speed(_CPU, psutil.virtual_memory().available)
    finally:
        torch.set_num_threads(before)

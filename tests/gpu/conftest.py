"""Providers that compute on a GPU are started cold: CUDA does not work in a process that was forked."""

import subprocess
from collections.abc import Iterator

import pytest

from ravnest.coordinator.launch import provider_processes as processes


@pytest.fixture(scope="module", autouse=True)
def cold_providers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "subprocess", subprocess)
        yield

"""Providers that compute on a GPU are started cold: CUDA does not work in a process that was forked."""

from collections.abc import Iterator

import pytest

from ravnest.coordinator.launch import provider_processes
from ravnest.coordinator.launch.provider_processes import start_process


@pytest.fixture(scope="module", autouse=True)
def cold_providers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provider_processes, "start_process", start_process)
        yield

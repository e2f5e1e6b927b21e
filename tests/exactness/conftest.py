"""Exactness is compared on one thread."""

import os

import pytest


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Providers share the cores of a machine: with more than one each they would sum in another order than the plain
    loop does on its single thread, and differ in the last digit."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)

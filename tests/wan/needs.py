"""Skip for tests that need a lab on machines that cannot run one; in CI such tests fail instead."""

import os

import pytest

from tests.wan.lab import Lab


def need_lab() -> None:
    """Returns if a lab can run here. Otherwise skips the calling test, or fails it if `CI=true` is set."""
    if reason := Lab.unavailable():
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
